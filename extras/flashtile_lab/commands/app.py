"""The commands of ``flashtile-lab``."""

from __future__ import annotations

from flashtile.cli.run import examples, new_app
from flashtile_lab.commands import analyze, explore, kernels, reproduce
from flashtile_lab.commands.demo.command import demo

app = new_app(
    "What attention costs, how it works, and what flashtile's kernels become.",
    examples(
        "Start here",
        "flashtile-lab demo                exactness, memory, time and a trained model",
        "flashtile-lab analyze memory      what attention costs, and why",
        "flashtile-lab explore             attention at work, in a browser",
        "flashtile-lab reproduce           published figures beside ours",
    ),
)
app.command(
    short_help="Exactness, memory, time and a trained model.",
    epilog=examples(
        "Examples",
        "flashtile-lab demo",
        "flashtile-lab demo --quick --out /tmp/demo",
        "flashtile-lab demo --device cpu --threads 2 --memory-budget-mb 512",
    ),
)(demo)
app.add_typer(analyze.app, name="analyze", short_help="What attention costs, in tables.")
app.command(
    short_help="Attention at work, on a page in a browser.",
    epilog=examples("Examples", "flashtile-lab explore", "flashtile-lab explore --serve --no-open --port 8000"),
)(explore.explore)
app.command(
    short_help="Published figures beside ours.",
    epilog=examples(
        "Examples", "flashtile-lab reproduce", "flashtile-lab reproduce fp8", "flashtile-lab reproduce D15"
    ),
)(reproduce.reproduce)
app.command(
    short_help="What the compiler makes of GPU kernels.",
    epilog=examples("Examples", "flashtile-lab kernels --arch sm_90a --quick"),
)(kernels.kernels)
