"""From tokens to batches: training windows, and an evaluation that counts every token once."""

import numpy as np
import torch


def window_starts(seed, step, count, tokens, block):
    """Where the windows of samples 0..count−1 of update `step` start in a text; int64 (count,).

    Entry i depends on (seed, step, i) alone, so that it is the same however an update is cut into
    forwards or shared among processes, and after a resume: a counter-based generator, keyed by seed
    and step, whose i-th draw is sample i's. ValueError if the text has no window of block + 1.
    """
    if tokens <= block:
        raise ValueError(f"the text has {tokens} tokens, too few for a context of block {block}")
    rng = np.random.Generator(np.random.Philox(key=[seed, step]))
    return (rng.random(count) * (tokens - block)).astype(np.int64)


def get_batch(tokens, starts, block):
    """(inputs, targets), int64 (B, block) each: the windows at `starts`, and the same one later."""
    w = torch.from_numpy(np.stack([tokens[i : i + block + 1] for i in starts]).astype(np.int64))
    return w[:, :-1], w[:, 1:]


@torch.no_grad()
def evaluate(loss_of, tokens, block, batch, world=None):
    """Mean cross-entropy, in nats per token, over a whole text; every token predicted once.

    loss_of(ids, targets): the mean loss of a batch (B, block), targets of −100 ignored. tokens:
    1-D; the first is context only (a text's opening <|endoftext|>). The windows do not overlap; the
    last is filled up with targets that do not count. The mean is over tokens: the batch size does
    not matter. In a `world` of several processes each takes its turn; all make as many forwards.
    """
    size, rank = (world.size, world.rank) if world else (1, 0)
    total, n = 0.0, len(tokens) - 1
    for round_at in range(0, n, size * block * batch):
        at = round_at + rank * block * batch
        piece = torch.from_numpy(tokens[at : at + block * batch + 1].astype(np.int64))
        count = max(0, len(piece) - 1)
        ids = torch.zeros(batch * block, dtype=torch.int64)
        targets = torch.full_like(ids, -100)
        ids[:count], targets[:count] = piece[:count], piece[1:]
        loss = loss_of(ids.view(batch, block), targets.view(batch, block))
        if count:  # else there was nothing left, but the others may wait for this forward
            total += loss.item() * count
    if size > 1:
        mine = torch.tensor(total, dtype=torch.float64, device=world.device)
        total = world.mean(mine).item() * size
    return total / n
