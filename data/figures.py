"""How this project draws: one colour and one marker for each variant, labels beside the lines."""

import warnings

import numpy as np

# distinguishable with red-green blindness (Okabe and Ito's palette, and greys); the markers and
# dashes tell them apart in grey
STYLES = {
    "pre": ("#000000", "o", "-"), "pre+gpas": ("#E69F00", "s", "-"), "lns": ("#0072B2", "^", "-"),
    "lns+gpas": ("#56B4E9", "v", "--"), "span": ("#009E73", "D", "-"),
    "span+gpas": ("#66C2A5", "d", "--"), "post": ("#D55E00", "X", "-"),
    "deepnorm": ("#CC79A7", "P", "-"), "mix": ("#8C510A", "<", "-."),
    "sandwich": ("#7A5195", ">", "-."), "peri": ("#B59CC9", "h", ":"),
    "hybrid": ("#8A8A00", "p", ":"), "hybrid_star": ("#B8B84D", "*", ":"),
    "scaleres": ("#9A9A9A", "8", ":"),
}  # fmt: skip


def pyplot():
    """matplotlib.pyplot, drawing to files or to a notebook, in this project's style."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EncodingWarning)  # matplotlib's own
        import matplotlib
        import matplotlib.pyplot as plt
    plt.rcParams |= {
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "figure.constrained_layout.use": True, "axes.titlesize": 10, "axes.labelsize": 9,
        "xtick.labelsize": 8, "ytick.labelsize": 8, "font.size": 9, "figure.dpi": 100,
        "svg.fonttype": "none", "text.parse_math": False,
    }  # fmt: skip
    matplotlib.rcParams["savefig.dpi"] = 120
    return plt


def shown(norm):
    """A variant's name as people say it: pre+gpas is gpas."""
    norm = norm.rpartition(":")[2]  # of a variant of one's own the class
    return "gpas" if norm == "pre+gpas" else norm


def style(norm):
    """Keywords of plot() for a variant, the same in every figure; any other name gets a grey."""
    norm = "pre+gpas" if norm == "gpas" else norm
    base = norm.removesuffix("+gpas")
    color, marker, dash = STYLES.get(norm) or STYLES.get(base) or ("#606060", ".", "-")
    dash = "--" if norm.endswith("+gpas") and norm not in STYLES else dash
    return {"color": color, "marker": marker, "ls": dash, "ms": 4, "lw": 1.4}


def label_lines(ax, ends):
    """Write each name beside the end of its line; ends: [(x, y, name, colour)], kept apart."""
    if not ends:
        return
    ax.figure.canvas.draw()  # the axis limits are final now
    to_pixels, height = ax.transData.transform, 11
    placed = sorted(((to_pixels((x, y)), name, color) for x, y, name, color in ends if
                     np.isfinite(y)), key=lambda e: e[0][1])  # fmt: skip
    low, last = -np.inf, []
    for (px, py), name, color in placed:
        low = max(py, low + height)
        last.append((px, py, low, name, color))
    for px, py, y, name, color in last:
        ax.annotate(name, ax.transData.inverted().transform((px, py)), (6, y - py),
                    textcoords="offset pixels", color=color, fontsize=8, va="center",
                    annotation_clip=False)  # fmt: skip


def by_depth(ax, lines, ylabel, xlabel="block", log=True, labels=None):
    """Draw {norm: values of block 1..L}, each in its colour and with its name at its end."""
    ends = []
    for name, values in lines.items():
        y = np.asarray(values, float)
        x = np.arange(1, len(y) + 1)
        look = style(name.split(" ")[0])
        ax.plot(x, y, **look | {"marker": None})
        ends.append((x[-1], y[-1], (labels or {}).get(name, shown(name)), look["color"]))
    ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
    label_lines(ax, ends)
