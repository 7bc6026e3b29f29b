"""The commands of ``flashtile``."""

from __future__ import annotations

from flashtile.cli import audit, build, explain, info, tune
from flashtile.cli.run import examples, new_app

app = new_app(
    "Exact attention in pure Python, on any machine.",
    examples(
        "Start here",
        "flashtile info                    what this machine can run",
        "flashtile explain --seqlen 4096   which backend and tiles a call would take",
        "flashtile audit model.py:make     whether a model's attention is right, layer by layer",
        "flashtile tune --list             tiles measured on this machine",
    ),
)
app.command(
    short_help="What this machine can run.",
    epilog=examples("Examples", "flashtile info", "flashtile info --json"),
)(info.info)
app.command(
    short_help="Which backend a call takes, and why.",
    epilog=examples(
        "Examples",
        "flashtile explain --seqlen 8192 --causal --grad",
        "flashtile explain --seqlen 32768 --window 256 0 --kv-heads 4",
        "flashtile explain --gpu H100 --dtype bfloat16 --softcap 30 --grad",
        "flashtile explain --gpu H100 --seqlen-q 1 --seqlen-k 32768 --page-size 64 --cache-dtype float8_e4m3fn",
    ),
)(explain.explain)
app.command(
    short_help="Which attention runs in a model, and whether it is right.",
    epilog=examples(
        "Examples",
        "flashtile audit model.py:make",
        "flashtile audit package.module:make --causal --window 127 0 --html audit.html",
    ),
)(audit.audit)
app.command(
    short_help="Kernels compiled ahead, into an archive.",
    epilog=examples(
        "Examples",
        "flashtile build --arch sm_90 --model llama3-8b --pages 16 -o kernels.ftk",
        "flashtile build --arch sm_80 --heads 32/8 --head-dim 128 --causal --packed --dtype bf16,fp16 -o kernels.ftk",
        "flashtile build --arch sm_90 --missed missed.jsonl -o kernels.ftk",
    ),
)(build.build)
app.command(
    short_help="Faster tiles for your shapes, measured here.",
    epilog=examples(
        "Examples",
        "flashtile tune --shape 4,4096,32,8,128 --causal",
        "flashtile tune --shape 1,8k,16,64 --shape 8,1k,16,64 --dtype float16 --forward --seconds 120",
        "flashtile tune --list",
    ),
)(tune.tune)
