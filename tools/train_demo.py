"""Make the embedded demonstration model: ``python tools/train_demo.py [--out swarm/demo/village] [--steps N]``.

A byte-level BPE tokenizer and a small Llama (8 layers, 4 heads, 2 key/value heads) learn the texts that
``demo_world.py`` writes. Needs the ``worker`` extra. Everything is drawn from one seed and the number of threads is
fixed, so the same machine with the same torch makes the same files again; another CPU may round differently and end
with slightly different weights. Takes about ten minutes on two free cores; if others use them too, set
``OMP_WAIT_POLICY=PASSIVE``, or threads that wait take the cores from those that work. Prints the loss and, at the end,
samples and a score.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from random import Random

import demo_world as world
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
THREADS = 2
VOCABULARY = 768  # 256 bytes, the special tokens, and nearly every word of the world with its leading space
BEGIN, END, USER, ASSISTANT, SYSTEM = SPECIALS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Most of the training reads short windows, which is quick; the end reads long ones, so that late positions work too.
PHASES = ((0.85, 16, 256), (1.0, 4, 1024))  # (up to this share of the steps, rows, positions)
PEAK_RATE = 3e-3
SIZE_LIMIT = 5_000_000


Piece = tuple[str, bool]  # (text, whether the model shall learn to write it)


def render(document: str | list[world.Turn]) -> list[Piece]:
    """Write a document in pieces, special tokens written out; chats exactly as the chat template writes them.

    What the user says is only read: guessing at it would teach nothing and drown what can be learned.
    """
    if isinstance(document, str):
        return [(BEGIN, False), (document + END, True)]
    pieces: list[Piece] = [(BEGIN, False)]
    for role, text in document:
        pieces += [(f"<|{role}|>", False), (text + END, role == "assistant")]
    return pieces


def train_tokenizer(rng: Random) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (_plain(world.document(rng)) for _ in range(20_000))
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _plain(document: str | list[world.Turn]) -> str:
    return document if isinstance(document, str) else "\n".join(text for _, text in document)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=224,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=False
    )
    return model


def write_tokens(tokenizer: PreTrainedTokenizerFast, rng: Random, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Write at least ``count`` tokens of documents, one after the other, and the same as labels (-100: only read)."""
    tokens: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    total = 0
    while total < count:
        pieces = [piece for _ in range(1000) for piece in render(world.document(rng))]
        encoded = tokenizer.backend_tokenizer.encode_batch([text for text, _ in pieces], add_special_tokens=False)
        for encoding, (_, learned) in zip(encoded, pieces, strict=True):
            ids = np.asarray(encoding.ids, dtype=np.int64)
            tokens.append(ids)
            labels.append(ids if learned else np.full_like(ids, -100))
            total += len(ids)
    return np.concatenate(tokens), np.concatenate(labels)


def rate(step: int, steps: int) -> float:
    """Warm up over the first hundredth, then a cosine down to a hundredth of the peak."""
    warm_up = max(1, steps // 100)
    if step < warm_up:
        return PEAK_RATE * (step + 1) / warm_up
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))))


def train(model: LlamaForCausalLM, tokens: np.ndarray, labels: np.ndarray, steps: int) -> None:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    model.train()
    at, started, losses = 0, time.monotonic(), []
    for step in range(steps):
        rows, length = next((rows, length) for share, rows, length in PHASES if step < share * steps)
        part = slice(at, at + rows * length)
        at = part.stop
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        inputs, targets = (torch.from_numpy(array[part]).view(rows, length) for array in (tokens, labels))
        loss = model(input_ids=inputs, labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"step {step + 1}/{steps}  loss {mean:.4f}  {time.monotonic() - started:.0f} s", flush=True)


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """Ask the model in a chat."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return complete(model, tokenizer, prompt, special=False)


def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, special: bool = True) -> str:
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special, return_token_type_ids=False)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=160)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def score(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: Random, count: int) -> tuple[float, float]:
    """Find the share of questions answered word for word: about what is always so, and about what the text states."""
    fixed = stated = 0
    for _ in range(count):
        question, expected = world.fixed_question(rng)
        fixed += answer(model, tokenizer, question) == expected
        statements, pairs = world.stated_question(rng)
        stated += answer(model, tokenizer, " ".join([*statements, pairs[0][0]])) == pairs[0][1]
    return fixed / count, stated / count


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> int:
    """Write the ordinary Hugging Face files; returns their size in bytes."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    template = out / "chat_template.jinja"  # newer libraries read this file, older ones the key in the configuration
    config = json.loads((out / "tokenizer_config.json").read_text())
    config["chat_template"] = CHAT_TEMPLATE
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template.unlink(missing_ok=True)
    for path in out.iterdir():
        path.chmod(0o644)  # the weights are written for the owner alone, but they ship with the package
    return sum(path.stat().st_size for path in out.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded demonstration model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "swarm" / "demo" / "village")
    parser.add_argument("--steps", type=int, default=1300)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    rng = Random(SEED)
    tokenizer = train_tokenizer(rng)
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    tokens, labels = write_tokens(tokenizer, rng, options.steps * max(rows * length for _, rows, length in PHASES))
    train(model, tokens, labels, options.steps)
    model.eval()
    size = save(model, tokenizer, options.out)
    print(f"{options.out}: {size:,} bytes")
    for prompt in ("Once upon a time", "The cat is"):
        print(f"> {prompt}\n  {complete(model, tokenizer, prompt)}")
    for question in ("What colour is the cat?", "Mia has a green ball. What colour is the ball?", "Tell me a story."):
        print(f"? {question}\n  {answer(model, tokenizer, question)}")
    fixed, stated = score(model, tokenizer, Random(SEED + 1), 100)
    print(f"answered: {fixed:.0%} of the fixed questions, {stated:.0%} of the stated ones")
    if size > SIZE_LIMIT:
        raise SystemExit(f"the model takes {size:,} bytes; the limit is {SIZE_LIMIT:,}")


if __name__ == "__main__":
    main()
