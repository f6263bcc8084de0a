"""Builds a small random Qwen3 model folder: weights, byte-level BPE tokenizer, ChatML template with tool calls.

It knows the Qwen3 family's control tokens and nothing of engines. No model is downloaded anywhere in this project's
tests, so this folder is what they run on. What holds: two builds from one seed and one list of texts are equal, and
the chat template renders what the `qwen3` renderer renders, but for one thing: it keeps the thinking of every earlier
turn, where a full render of `renderers` drops the thinking before the last user message.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE = """\
{%- set first = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' }}{% if first is not none %}{{ first + '\\n\\n' }}{% endif -%}
{{ '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' -}}
{{ 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' -}}
{%- for tool in tools -%}{{ '\\n' + tool | tojson }}{%- endfor -%}
{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' -}}
{{ 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' -}}
{{ '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' -}}
{%- elif first is not none -%}
{{ '<|im_start|>system\\n' + first + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' -}}
{%- if m.reasoning_content -%}
{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
{%- elif enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- set body = (m.content or '').lstrip('\\n') if m.reasoning_content else (m.content or '') -%}
{{ body -}}
{%- for call in m.tool_calls or [] -%}
{%- set f = call.function or call -%}
{%- if body or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' -}}
{{ (f.arguments if f.arguments is string else f.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{ '<|im_end|>\\n' -}}
{%- elif not (loop.first and m.role == 'system') -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""

DEFAULT_TEXTS = (
    "You are a helpful assistant that can run commands in a shell and edit files in a folder.",
    "You may call one or more functions to assist with the user query. # Tools <tools></tools>",
    '{"name": "bash", "arguments": {"command": "cat src/main.py && ls -la"}}',
    '{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}',
    "Fix the bug in the function `total`: it returns a - b where it should return a + b.",
    "def total(a, b):\n    return a - b\n\nif __name__ == '__main__':\n    print(total(1, 2))\n",
    "The answer is 42. The quick brown fox jumps over the lazy dog, again and again.",
)


def build_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` tokens with Qwen3's control tokens, trained on `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    # As in Qwen3 these are single tokens but not "special": decoding with skip_special_tokens keeps them.
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path, *, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja in `out`."""
    import transformers

    fast_class: Any = transformers.PreTrainedTokenizerFast
    fast = fast_class(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(out))


def build_tiny_model(
    out: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 32,
    ff: int = 128,
    context: int = 32768,
    texts: Iterable[str] | None = None,
    vocab: int = 512,
    init: float = 0.08,
) -> Path:
    """Writes a random fp32 Qwen3 model folder to `out` and returns it.

    vocab: the most tokens the tokenizer may have, control tokens included (at least 265); the embedding has exactly the
    tokenizer's, so that every id sampled decodes. init: standard deviation of the weights; 0.08 keeps a model this
    narrow from being uniform.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(DEFAULT_TEXTS if texts is None else texts, vocab)
    save_tokenizer(tokenizer, out, context=context)
    end = tokenizer.token_to_id("<|im_end|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        initializer_range=init,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen3ForCausalLM(config)
    model.to(torch.float32).save_pretrained(str(out))
    return out
