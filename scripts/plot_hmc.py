"""Draws docs/assets/hmc_*.png and writes docs/tables/hmc_*.md, from results/hmc.json.

`python scripts/plot_hmc.py` after a part of benchmarks/bench_hmc.py.
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from pnkrylov import hmc

ROOT = pathlib.Path(__file__).parents[1]
PARTS = json.loads((ROOT / "benchmarks" / "results" / "hmc.json").read_text())["parts"]
# Okabe-Ito: told apart without red-green vision.
BLACK, BLUE, ORANGE, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#999999"
TARGETS = {
    "gaussian": "Gaussian, d = 200",
    "digits": "logistic regression, digits, d = 65",
    "cancer": "logistic regression, cancer, d = 31",
    "network": "tanh network, digits, d = 86",
    "weak-network": "tanh network, cancer, d = 134",
}
METHODS = {
    "none": "no mass matrix",
    "diagonal": "diagonal adaptation",
    "belief": "belief at the mode",
    "averaged": "belief, averaged curvature",
}


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def made_by(part):
    made = PARTS[part]["provenance"]
    return (
        f"Made by `{made['command']}` at commit `{made['commit'][:7]}"
        f"{'+changes' * made['commit'].endswith('+changes')}` on {made['date']}, "
        f"{made['machine']}, jax {made['versions']['jax']}, "
        f"blackjax {made['versions']['blackjax']}."
    )


def write(name, header, rows, part):
    text = markdown(header, rows) + "\n\n" + made_by(part)
    (ROOT / "docs" / "tables" / f"{name}.md").write_text(text + "\n")


def save(figure, name):
    figure.savefig(ROOT / "docs" / "assets" / f"{name}.png", dpi=130)
    plt.close(figure)


def number(value):
    """Two digits, never in scientific notation."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def column(records, key):
    return np.array([record[key] for record in records])


# ---- acceptance ---------------------------------------------------------------------------------


def acceptance_tables(records):
    rows = []
    groups = [(f"{n}", lambda r, n=n: r["dimension"] == n) for n in (32, 64, 128, 256, 512)]
    for low, high in ((0, 10), (10, 20), (20, 1000)):
        label = f"128 or more, {low} to {high} directions" if high < 1000 else (
            f"128 or more, over {low} directions")  # fmt: skip
        groups.append(
            (label, lambda r, a=low, b=high: r["dimension"] >= 128 and a <= r["effective"] < b)
        )
    for label, chosen in groups:
        own = [r for r in records if chosen(r)]
        if not own:
            continue
        gap = np.abs(column(own, "observed") - column(own, "predicted"))
        off = np.abs(column(own, "inferred_known") - 1)
        inside = column(own, "predicted") <= 0.95
        rows.append([
            label, str(len(own)), f"{gap.max():.3f}", f"{100 * np.mean(gap <= 0.02):.1f} %",
            f"{np.sqrt(np.mean(off[inside] ** 2)):.3f}",
            f"{100 * np.mean(off[inside] <= 0.05):.1f} %",
        ])  # fmt: skip
    header = ["N", "runs", "largest difference of acceptance", "within 0.02"]
    header += ["rms error of κ (acceptance up to 0.95)", "κ within 5 %"]
    write("hmc_acceptance", header, rows, "acceptance")


def chain_records(records):
    """{(kind, oversampling): array of estimated / true kappa}."""
    found = {}
    for record in records:
        for point in record.get("chain", []):
            for kind in ("plug_in", "inferred", "known"):
                found.setdefault((kind, point["oversampling"]), []).append(point[kind])
    return {key: np.array(values) for key, values in found.items()}


def chain_table(found):
    rows = []
    for ratio in sorted({key[1] for key in found}):
        row = [str(ratio)]
        for kind in ("plug_in", "inferred", "known"):
            values = found[kind, ratio]
            row.append(f"{np.sqrt(np.mean((values - 1) ** 2)):.3f}")
        rows.append([*row, str(len(found["known", ratio]))])
    header = ["S / N", "sample covariance", "inferred", "inferred, σ₁ known", "chains"]
    write("hmc_inferred", header, rows, "acceptance")


def plot_acceptance(records, found):
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    colours = plt.cm.viridis(np.linspace(0, 0.9, 5))
    rng = np.random.default_rng(0)
    for dimension, colour in zip((32, 64, 128, 256, 512), colours, strict=True):
        own = [r for r in records if r["dimension"] == dimension]
        jitter = rng.uniform(-0.006, 0.006, len(own))
        axes[0].plot(
            column(own, "predicted") + jitter, column(own, "observed"), ".",
            color=colour, markersize=4, alpha=0.7, label=f"N = {dimension}",
        )  # fmt: skip
    line = np.array([0.77, 0.985])
    axes[0].plot(line, line, color=BLACK, linewidth=0.8)
    axes[0].fill_between(line, line - 0.02, line + 0.02, color=GREY, alpha=0.25, linewidth=0)
    axes[0].set(xlabel="predicted acceptance", ylabel="observed", title="acceptance (band: ±0.02)")
    axes[0].legend(frameon=False, markerscale=2)
    at = [r for r in records if r["predicted"] == 0.8]
    axes[1].plot(
        column(at, "effective"), column(at, "observed") - 0.8, ".", color=BLUE, markersize=4
    )
    axes[1].axhline(0, color=BLACK, linewidth=0.8)
    axes[1].axhspan(-0.02, 0.02, color=GREY, alpha=0.25, linewidth=0)
    axes[1].set(
        xscale="log", xlabel="directions that make up ν", ylabel="observed - predicted",
        title="at predicted acceptance 0.8",
    )  # fmt: skip
    ratios = sorted({key[1] for key in found})
    styles = {
        "plug_in": (ORANGE, "s", "sample covariance"),
        "inferred": (BLUE, "o", "inferred from acceptance"),
        "known": (GREEN, "^", "inferred, σ₁ known"),
    }
    for shift, (kind, (colour, marker, label)) in enumerate(styles.items()):
        quantiles = np.array([np.quantile(found[kind, r], (0.05, 0.5, 0.95)) for r in ratios])
        x = np.array(ratios) * 1.05 ** (shift - 1)
        error = np.abs(quantiles[:, [0, 2]] - quantiles[:, [1]]).T
        axes[2].errorbar(
            x, quantiles[:, 1], error, color=colour, marker=marker, capsize=2, label=label
        )
    axes[2].axhline(1, color=BLACK, linewidth=0.8)
    axes[2].set(xscale="log", yscale="log", xlabel="draws per dimension S / N")
    axes[2].set(title="estimated κ / true κ (5 to 95 %)")
    axes[2].set_xticks(ratios, [str(r) for r in ratios])
    ticks = (0.9, 1, 1.2, 1.5, 2, 3)
    axes[2].set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes[2].minorticks_off()
    axes[2].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25)
    save(figure, "hmc_acceptance")


# ---- burn-in ------------------------------------------------------------------------------------


def law_table(law):
    rows = []
    for r in law:
        if r["oversampling"] not in (2, 4, 8) or r["dimension"] == 32:
            continue
        rows.append([
            str(r["dimension"]), f"{r['oversampling']:g}",
            f"{r['simulated']:.3f} ± {r['simulated_error']:.2g}",
            f"{100 * (r['finite_size'] / r['simulated'] - 1):+.1f} %",
            f"{100 * (r['edge'] / r['simulated'] - 1):+.1f} %",
            f"{r['divergence_simulated']:.3f} ± {r['divergence_error']:.2g}",
            f"{100 * (r['divergence'] / r['divergence_simulated'] - 1):+.1f} %",
        ])  # fmt: skip
    header = ["N", "S / N", "κ left, simulated", "finite-size prediction", "edge of the law"]
    header += ["reverse KL, simulated", "prediction"]
    write("hmc_law", header, rows, "burn-in")


def optima_table(optima):
    rows = []
    for r in optima:
        if r["dimension"] not in (50, 128) or r["at_the_end"]:
            continue
        rows.append([
            str(r["dimension"]), str(r["ratio"]), str(r["final"]), f"{r['brute_force']:.2f}",
            f"{r['optimal']:.2f}" if r["optimal"] else "does not pay",
            f"{r['edge']:.2f}" if r["edge"] else "does not pay",
            f"{r['brute_force_speedup']:.2f}", f"{r['speedup']:.2f}",
        ])  # fmt: skip
    header = ["N", "κ₀ / N^¼", "S_f / N", "best S / N, simulated", "predicted", "with the edge"]
    header += ["speed-up, simulated", "predicted"]
    write("hmc_burn_in", header, rows, "burn-in")


def plot_burn_in(law, optima):
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.9), layout="constrained")
    for dimension, colour in ((32, GREY), (64, BLUE), (256, GREEN)):
        own = [r for r in law if r["dimension"] == dimension]
        x, scale = column(own, "oversampling"), dimension**0.25
        axes[0].errorbar(
            x, column(own, "simulated") / scale, column(own, "simulated_error") / scale,
            color=colour, marker="o", markersize=4, linestyle="none", label=f"N = {dimension}",
        )  # fmt: skip
        axes[0].plot(x, column(own, "finite_size") / scale, color=colour)
    own = [r for r in law if r["dimension"] == 256]
    axes[0].plot(
        column(own, "oversampling"), column(own, "edge") / 256**0.25,
        color=BLACK, linestyle=":", label="edge, N to infinity",
    )  # fmt: skip
    axes[0].set(xscale="log", yscale="log", xlabel="draws per dimension S / N")
    axes[0].set(title=r"$\kappa(S)\,/\,N^{1/4}$ left (lines: predicted)")
    ticks = (1.5, 2, 4, 8, 16)
    axes[0].set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes[0].set_yticks((1, 1.5, 2, 3, 5), ["1", "1.5", "2", "3", "5"])
    axes[0].minorticks_off()
    axes[0].legend(frameon=False)
    ratios = np.geomspace(1.5, 100, 60)
    for final, colour in ((10, BLUE), (40, ORANGE), (160, GREEN)):
        curve = [hmc.optimal_burn_in(float(r) * 64**0.25, 64, final * 64) for r in ratios]
        samples = np.array([float(c.num_samples) / 64 for c in curve])
        pays = samples > 0
        axes[1].plot(ratios[pays], samples[pays], color=colour, label=f"$S_f/N$ = {final}")
        axes[2].plot(ratios, [float(c.speedup) for c in curve], color=colour)
        own = [
            r for r in optima
            if r["dimension"] == 64 and r["final"] == final and not r["at_the_end"]
            and r["brute_force_speedup"] > 1
        ]  # fmt: skip
        axes[1].plot(column(own, "ratio"), column(own, "brute_force"), "o", color=colour)
        axes[2].plot(column(own, "ratio"), column(own, "brute_force_speedup"), "o", color=colour)
    for axis in axes[1:]:
        axis.set(xscale="log", yscale="log", xlabel=r"$\kappa_0\,/\,N^{1/4}$")
        ticks = (1, 2, 5, 10, 20)
        axis.set_yticks(ticks, [str(t) for t in ticks])
        axis.set_xticks((2, 5, 10, 30, 100), ["2", "5", "10", "30", "100"])
        axis.minorticks_off()
    axes[1].set(title="optimal burn-in S / N, N = 64 (dots: brute force)")
    axes[2].set(title="speed-up")
    axes[1].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25)
    save(figure, "hmc_burn_in")


# ---- the other tables ---------------------------------------------------------------------------


def condition_table(records):
    rows = [
        [
            r["matrix"], r["role"], f"{r['exact']:.1f}", f"{r['value']:.1f}",
            f"{r['lower']:.1f} to {r['upper']:.1f}", str(r["num_matvecs"]),
        ]
        for r in records
    ]  # fmt: skip
    header = [
        f"d = {records[0]['size']}",
        "operator",
        "exact κ",
        "estimate",
        "interval",
        "products",
    ]
    write("hmc_condition", header, rows, "condition")


def preconditioners_table(records):
    names = {
        "none": "none",
        "forward_diagonal": "marginal variances (forward KL)",
        "reverse_diagonal": "conditional variances (reverse KL)",
        "sample_covariance": "sample covariance, S = 4 N",
        "reverse_full": "reverse KL, full, 4 N draws of noise",
        "belief_20": "belief, 20 products",
        "belief_40": "belief, 40 products",
        "belief_80": "belief, 80 products",
        "belief_160": "belief, 160 products",
        "floor": "least possible, N^¼",
    }
    rows = [[label, *(f"{r[key]:.1f}" for r in records)] for key, label in names.items()]
    header = [f"κ left, N = {records[0]['size']}", *(r["matrix"] for r in records)]
    write("hmc_preconditioners", header, rows, "preconditioners")


def whitening_summary(name):
    """{(sampler, method): medians over seeds}."""
    again = PARTS.get(f"whitening {name} averaged", {"records": []})
    records, summary = PARTS[f"whitening {name}"]["records"] + again["records"], {}
    for r in records:
        # The least over coordinates and over principal directions: what one would wait for.
        ess = min(r["ess_coordinates"], r["ess_directions"])
        total = r["building"] + r["warm_up"] + r["sampling"]
        own = {
            "ess": ess, "per_thousand": 1e3 * ess / total,
            "sampling_only": 1e3 * ess / r["sampling"],
            "building": r["building"] + r["warm_up"], "sampling": r["sampling"],
            "kappa": r["kappa"],
            # White coordinates have standard deviations of about 1.
            "step": r["step_size"] / float(hmc.step_size_for(0.8, r["kappa"])),
            "functionals": r.get("ess_functionals", np.nan),
        }  # fmt: skip
        summary.setdefault((r["sampler"], r["method"]), []).append(own)
    return {
        key: {name: float(np.median([own[name] for own in found])) for name in found[0]}
        for key, found in summary.items()
    }


def whitening_table(found):
    rows = []
    for name, summary in found.items():
        for (sampler, method), own in sorted(summary.items(), key=lambda item: item[0][0]):
            reference = summary[sampler, "diagonal"]["per_thousand"]
            rows.append([
                TARGETS[name], sampler.upper(), METHODS[method], f"{own['kappa']:.1f}",
                f"{own['building']:.0f}", f"{own['sampling']:.0f}", f"{own['ess']:.0f}",
                number(own["per_thousand"]), f"{own['per_thousand'] / reference:.1f} x",
                f"{own['sampling_only'] / summary[sampler, 'diagonal']['sampling_only']:.1f} x",
                f"{own['step']:.2f}" if method in ("belief", "averaged") else "",
            ])  # fmt: skip
    header = ["target", "sampler", "mass matrix", "κ left", "gradients before", "while sampling"]
    header += ["smallest ESS", "ESS per 1000 gradients", "over diagonal", "without warm-up"]
    header += ["step size / predicted"]
    write("hmc_whitening", header, rows, f"whitening {next(iter(found))}")


def plot_whitening(found):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharex=True, layout="constrained")
    colours = {"none": GREY, "diagonal": BLUE, "belief": ORANGE, "averaged": GREEN}
    for axis, sampler in zip(axes, ("nuts", "hmc"), strict=True):
        for row, name in enumerate(found):
            for shift, method in enumerate(METHODS):
                own = found[name].get((sampler, method))
                if own is None:
                    continue
                axis.barh(
                    row + 0.21 * (shift - 1.5), own["per_thousand"], height=0.2,
                    color=colours[method], label=METHODS[method] if row == 1 else None,
                )  # fmt: skip
                axis.annotate(
                    number(own["per_thousand"]), (own["per_thousand"], row + 0.21 * (shift - 1.5)),
                    xytext=(3, 0), textcoords="offset points", va="center", fontsize=7,
                )  # fmt: skip
        axis.set(xscale="log", title=sampler.upper(), xlabel="ESS per 1000 gradients, all included")
        axis.set_yticks(range(len(found)), [TARGETS[name] for name in found])
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.grid(alpha=0.25, axis="x")
    axes[1].set_yticklabels([])
    axes[0].legend(frameon=False, loc="lower right")
    save(figure, "hmc_whitening")


def main():
    if "acceptance" in PARTS:
        records = PARTS["acceptance"]["records"]
        found = chain_records(records)
        acceptance_tables(records)
        chain_table(found)
        plot_acceptance(records, found)
    if "burn-in" in PARTS:
        law_table(PARTS["burn-in"]["law"])
        optima_table(PARTS["burn-in"]["optima"])
        plot_burn_in(PARTS["burn-in"]["law"], PARTS["burn-in"]["optima"])
    if "condition" in PARTS:
        condition_table(PARTS["condition"]["records"])
    if "preconditioners" in PARTS:
        preconditioners_table(PARTS["preconditioners"]["records"])
    found = {name: whitening_summary(name) for name in TARGETS if f"whitening {name}" in PARTS}
    if found:
        whitening_table(found)
        plot_whitening(found)


if __name__ == "__main__":
    main()
