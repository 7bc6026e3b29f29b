"""Moves the controls of a figure as a reader does, and reads what the figure computes then."""

from __future__ import annotations

import json
from typing import Any

from tests.browser import Tab

# Sets a control as a reader does: its value, then the event.
SET = """(figure, values) => {
  for (const [name, value] of Object.entries(values)) {
    const control = document.querySelector(`#${figure} .controls [name="${name}"]`);
    if (control.type === 'checkbox') control.checked = value; else control.value = value;
    control.dispatchEvent(new Event('input', { bubbles: true }));
  }
  return explore.numbers[figure];
}"""


def put(tab: Tab, figure: str, **values: Any) -> Any:
    """What a figure computes with these values of its controls."""
    return tab.run(f"({SET})({json.dumps(figure)}, {json.dumps(values)})")


def evaluated(tab: Tab, script: str, *arguments: Any) -> Any:
    """The value of a JavaScript function of JSON values."""
    return tab.run(f"({script})({', '.join(json.dumps(each) for each in arguments)})")
