"""The demo model with a chat template that opens thinking, for tests of a whole swarm.

The model can't think. With a budget, its text until then is the thinking, and what follows is the answer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from swarm.demo import model_path

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% set content = message.content %}"
    "{% if message.role == 'assistant' and message.reasoning_content %}"
    "{% set content = '<think>\n' + message.reasoning_content + '\n</think>\n\n' + content %}"
    "{% endif %}"
    "{{ '<|' + message.role + '|>' + content + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|assistant|>' }}"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
    "{% endif %}"
)


def make_thinking_model(folder: Path) -> Path:
    """Copy the demo model into a folder of its name, with the template."""
    copy = folder / model_path().name
    shutil.copytree(model_path(), copy)
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return copy
