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


def plain_pyplot(backend=None):
    """matplotlib.pyplot as it comes; loaded when first drawn with, and without its own warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EncodingWarning)
        import matplotlib

        if backend:
            matplotlib.use(backend)
        import matplotlib.pyplot as plt
    return plt


def pyplot():
    """matplotlib.pyplot, drawing to files or to a notebook, in this project's style."""
    plt = plain_pyplot()
    plt.rcParams |= {
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "figure.constrained_layout.use": True, "axes.titlesize": 10, "axes.labelsize": 9,
        "xtick.labelsize": 8, "ytick.labelsize": 8, "font.size": 9, "figure.dpi": 100,
        "svg.fonttype": "none", "text.parse_math": False, "savefig.dpi": 120,
    }  # fmt: skip
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


def by_depth(ax, lines, ylabel, xlabel="block", log=True):
    """Draw {name: values of block 1..L, or (seeds, L)}, each with its name at its end.

    A name starts with its variant, which gives the colour. Of several seeds: their mean, and a band
    of one standard error.
    """
    ends, used = [], {}
    for name, values in lines.items():
        y = np.atleast_2d(np.asarray(values, float))
        x, mean = np.arange(1, y.shape[1] + 1), y.mean(0)
        look = style(name.split(" ")[0])
        again = used[look["color"]] = used.get(look["color"], -1) + 1  # a colour drawn before
        dash = ("-", "--", ":", "-.")[again % 4] if again else look["ls"]
        ax.plot(x, mean, color=look["color"], ls=dash, lw=1.4)
        if len(y) > 1:
            se = y.std(0, ddof=1) / len(y) ** 0.5
            ax.fill_between(x, mean - se, mean + se, color=look["color"], alpha=0.2, lw=0)
        ends.append((x[-1], mean[-1], name, look["color"]))
    ax.set(xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
    label_lines(ax, ends)


def arms(ax, values, xlabel):
    """{name: [a value for each seed]} as dots, with mean and standard error, one row each."""
    for i, (name, v) in enumerate(reversed(values.items())):
        v, color = np.asarray(v, float), style(name.split(" ")[0])["color"]
        ax.plot(v, [i] * len(v), ".", color=color, alpha=0.5)
        se = v.std(ddof=1) / len(v) ** 0.5 if len(v) > 1 else 0
        ax.errorbar(v.mean(), i, xerr=se, capsize=3, marker="o", ms=4, color=color)
    ax.set_yticks(range(len(values)), [*reversed(values)])
    ax.set_xlabel(xlabel)


def heat(ax, values, xlabel, ylabel, what, **options):
    """A matrix as a heat map with its scale; row and column 0 at the lower left."""
    image = ax.imshow(values, origin="lower", aspect="auto", cmap="cividis", **options)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.figure.colorbar(image, ax=ax, label=what)
