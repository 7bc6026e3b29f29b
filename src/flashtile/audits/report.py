"""What an audit found, as text and as a page."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashtile.audits.faults import Finding
from flashtile.audits.measure import Errors, SeenPairs


@dataclass(frozen=True)
class AuditedCall:
    """One attention call of a layer.

    Attributes:
        layer: The module's name in the model.
        function: What was called, and which kernel ran.
        sizes: batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim.
        dtype: The queries' dtype.
        mask: The mask that was in force, in words.
        scale: The factor of the scores, with what queries had been multiplied by before; None if it could not be seen.
        max_score: The largest kept score.
        kept: What the mask keeps; None if the call could not be read.
        errors: The result beside attention in float64; None if they were not compared.
        unknown: Why they were not.
    """

    layer: str
    function: str
    sizes: tuple[int, ...]
    dtype: str
    mask: str
    scale: float | None
    max_score: float
    kept: SeenPairs | None
    errors: Errors | None
    unknown: str

    def cells(self) -> tuple[str, ...]:
        """A row of the report."""
        batch, rows, keys, heads, kv, dim = self.sizes
        length = f"{rows}" if rows == keys else f"{rows}x{keys}"
        shape = f"{batch} x {length} x {heads if heads == kv else f'{heads}/{kv}'} x {dim} {self.dtype}"
        found = self.errors
        numbers = ("-", "-") if found is None else (f"{found.error:.1e}", f"{found.plain:.1e}")
        empty = "-" if self.kept is None else str(self.kept.empty[0])
        return self.layer, self.function, shape, self.mask, *numbers, f"{self.max_score:.3g}", empty


_HEAD = ("layer", "attention", "shape", "mask", "error", "plain", "max score", "empty rows")


@dataclass(frozen=True)
class Audit:
    """What ``flashtile.audit`` found. ``str`` of it is a report; ``html`` and ``save`` make a page of it.

    Attributes:
        model: The model's class.
        calls: The attention calls, in order.
        findings: What is wrong; empty if nothing was found.
        notes: What is worth knowing and is no fault, such as a mask that cuts nothing.
        moved: The share of tokens that get another largest logit if attention is exact; None if there are no logits.
    """

    model: str
    calls: tuple[AuditedCall, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    moved: float | None

    @property
    def compared(self) -> int:
        """How many of the calls were compared with float64."""
        return sum(call.errors is not None for call in self.calls)

    def _summary(self) -> Iterator[str]:
        count = len(self.calls)
        yield f"{count} attention call{'s' if count != 1 else ''}, {self.compared} compared with float64"
        if self.moved is not None:
            yield f"{100 * self.moved:.2g} % of tokens get another largest logit if attention is exact"

    def _verdict(self) -> str:
        count = len(self.findings)
        if count:
            return f"{count} finding{'s' if count != 1 else ''}"
        return "nothing found" if self.compared else "nothing compared"

    def __str__(self) -> str:
        groups = list(_grouped(self.calls))
        rows = [_HEAD, *groups]
        widths = [max(len(row[n]) for row in rows) for n in range(len(_HEAD))]
        lines = [f"{self.model}: {'; '.join(self._summary())}", ""] if groups else [f"{self.model}: no attention call"]
        for row in rows if groups else ():
            cells = [cell.ljust(width) if n < 4 else cell.rjust(width) for n, (cell, width) in _zipped(row, widths)]
            lines.append("  ".join(cells).rstrip())
        lines += ["", self._verdict()]
        lines += [f"  {line}" for line in _joined(self.findings)]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def html(self) -> str:
        """The report as one page of HTML, with nothing from elsewhere."""
        rows = "".join(
            f'<tr class="{"bad" if any(f.layer == call.layer for f in self.findings) else "good"}">'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in call.cells())
            + "</tr>\n"
            for call in self.calls
        )
        found = "".join(
            f"<li><b>{html.escape(f.kind)}</b> <code>{html.escape(f.layer or 'the model')}</code> "
            f"{html.escape(f.text)}</li>\n"
            for f in self.findings
        )
        notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in self.notes)
        return _PAGE.format(
            title=html.escape(f"Attention of {self.model}"),
            summary=html.escape("; ".join(self._summary())),
            verdict=self._verdict().capitalize(),
            state="bad" if self.findings or not self.compared else "good",
            findings=f"<ul>{found}</ul>" if found else "",
            notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
            head="".join(f"<th>{name}</th>" for name in _HEAD),
            rows=rows,
        )

    def save(self, path: str | Path) -> None:
        """Writes the page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")


def _zipped(row: tuple[str, ...], widths: list[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))


def _grouped(calls: tuple[AuditedCall, ...]) -> Iterator[tuple[str, ...]]:
    """Rows of the table; layers one after another that differ in nothing but numbers share one, with the worst."""
    run: list[AuditedCall] = []
    for call in (*calls, None):
        if run and (call is None or _kind(call) != _kind(run[0])):
            worst = max(run, key=lambda each: each.errors.error if each.errors else 0.0)
            cells = list(worst.cells())
            if len(run) > 1:
                cells[0] = f"{run[0].layer} ... {run[-1].layer} ({len(run)})"
            yield tuple(cells)
            run = []
        if call is not None:
            run.append(call)


def _joined(findings: tuple[Finding, ...]) -> Iterator[str]:
    """Findings in lines; layers with the same one share a line."""
    layers: dict[tuple[str, str], list[str]] = {}
    for each in findings:
        layers.setdefault((each.kind, each.text), []).append(each.layer or "the model")
    for (kind, text), names in layers.items():
        place = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
        yield f"{place}: {kind}: {text}"


def _kind(call: AuditedCall) -> tuple[object, ...]:
    at_fault = call.errors is not None and call.errors.is_fault()
    return call.function, call.sizes, call.dtype, call.mask, call.scale, at_fault, call.kept and call.kept.empty


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; --line: #8884; --bad: #c0392b; --good: #2e8b57; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2.5rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
.verdict {{ display: inline-block; padding: .15rem .8rem; border-radius: 1rem; color: #fff; font-weight: 600; }}
.verdict.bad {{ background: var(--bad); }} .verdict.good {{ background: var(--good); }}
.table {{ overflow-x: auto; }} table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .4rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:nth-child(n+5), td:nth-child(n+5) {{ text-align: right; }}
td:first-child {{ font-family: ui-monospace, monospace; border-left: .25rem solid var(--good); }}
tr.bad td:first-child {{ border-left-color: var(--bad); }} li {{ margin: .35rem 0; }}
</style></head><body>
<h1>{title}</h1><p>{summary}</p><p><span class="verdict {state}">{verdict}</span></p>
{findings}<h2>Layers</h2><div class="table"><table><thead><tr>{head}</tr></thead><tbody>
{rows}</tbody></table></div>
<p>error: the largest difference from attention in float64 on the same tensors. plain: the same for plain PyTorch in the
layer's dtype.</p>{notes}</body></html>
"""
