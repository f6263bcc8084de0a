"""A stand-in for mini-swe-agent's package folder, in our own words: the same two files, the same template variables."""

from pathlib import Path

import pytest

from examples.policy.prompts import MiniPrompts, load_prompts
from polarlike.templates import ChatTemplate, load_template

MODEL = Path(__file__).resolve().parents[2] / "examples" / "policy" / "model"

CONFIG = """\
agent:
  system_template: |
    You help at a computer.
  instance_template: |
    Do this: {{task}}

    Use the tool.
    Say what you do.
    {%- if system == "Darwin" -%}
    Mac.
    {%- endif -%}

    Host: {{system}} {{release}} {{version}} {{machine}}
model:
  observation_template: |
    {
      "returncode": {{ output.returncode }},
      "output": {{ output.output | tojson }}
      {%- if output.exception_info %}, "exception_info": {{ output.exception_info | tojson }}{% endif %}
    }
  format_error_template: |
    Bad call: {{ error }}
"""
TOOL = """\
BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run it",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
"""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "minisweagent"
    (folder / "config").mkdir(parents=True)
    (folder / "models" / "utils").mkdir(parents=True)
    (folder / "config" / "mini.yaml").write_text(CONFIG)
    (folder / "models" / "utils" / "actions_toolcall.py").write_text(TOOL)
    return folder


@pytest.fixture(scope="session")
def prompts(package: Path) -> MiniPrompts:
    return load_prompts(package)


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return load_template(MODEL)
