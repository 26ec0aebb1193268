"""Train the target and draft that ship in `hf_specdec/demo`, from freely licensed text, on a CPU.

The target learns next-token prediction on a mix of code, documentation, JSON and prose; the draft learns by
distillation (Kullback-Leibler divergence to the target's logits), first on the same text and then on text that
the target wrote itself, because that is what a draft has to guess (Agarwal et al., arXiv:2306.13649;
DistillSpec, arXiv:2310.08461). Float32 on one thread with fixed seeds: two runs on one machine give one result.

    apt-get download python3.11-doc r-cran-janeaustenr
    for f in *.deb; do dpkg-deb -x "$f" debian; done
    python examples/train_demo_pair.py --debian debian --output hf_specdec/demo
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html.entities
import json
import math
import random
import re
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MIX = {"code": 0.42, "docs": 0.20, "json": 0.08, "prose": 0.30}
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "__pycache__"}
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
SEQUENCE_LENGTH = 256


# ---- text ------------------------------------------------------------------------------------------------------


def read_code() -> Iterator[tuple[str, str]]:
    """Yield name and text of the running Python's library modules (PSF-2.0)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED_FOLDERS.intersection(path.relative_to(library).parts):
            yield path.relative_to(library).as_posix(), path.read_text(encoding="utf-8", errors="replace")


def read_docs(debian: Path) -> Iterator[tuple[str, str]]:
    """Yield the reStructuredText sources of Debian's python3.11-doc (PSF-2.0)."""
    for path in sorted(debian.rglob("*.rst.txt")):
        yield path.name, path.read_text(encoding="utf-8", errors="replace")


def read_json(code: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield JSON documents made from tables of the standard library and from the signatures in its modules."""
    statuses = [{"code": s.value, "name": s.name, "phrase": s.phrase, "description": s.description} for s in HTTPStatus]
    entities = [{"name": n, "codepoint": c, "hex": hex(c)} for n, c in sorted(html.entities.name2codepoint.items())]
    for table_name, table in (("statuses", statuses), ("entities", entities)):
        for start in range(0, len(table), 8):
            yield f"{table_name}-{start}", json.dumps({table_name: table[start : start + 8]}, indent=2)
    for name, text in code:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield f"{name}:{node.name}", json.dumps(describe_class(name, node), indent=2)


def describe_class(module: str, node: ast.ClassDef) -> dict[str, object]:
    """Return what a JSON index of the library would say of one class."""
    methods = [
        {"name": item.name, "line": item.lineno, "arguments": [a.arg for a in item.args.args]}
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    ]
    summary = (ast.get_docstring(node) or "").split("\n")[0]
    return {"module": module, "class": node.name, "line": node.lineno, "summary": summary, "methods": methods}


def read_prose(debian: Path) -> Iterator[tuple[str, str]]:
    """Yield chapters of Jane Austen's novels (public domain) out of Debian's r-cran-janeaustenr.

    The package stores them as R data: blocks of a 4-byte length and zlib data, in which each line of text is
    a CHARSXP record (4 flag bytes that end in type 9, a 4-byte length, the bytes).
    """
    database = next(debian.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    record = re.compile(rb"\x00[\x00-\x0f][\x00-\xff]\x09([\x00-\xff]{4})")
    position, lines = 0, []
    for block in re.finditer(rb"\x78[\x01\x5e\x9c\xda]", database):
        if block.start() < position:
            continue
        try:
            decompressor = zlib.decompressobj()
            data = decompressor.decompress(database[block.start() :])
        except zlib.error:
            continue
        position = len(database) - len(decompressor.unused_data)
        cursor = 0
        while match := record.search(data, cursor):
            size = int.from_bytes(match.group(1), "big")
            cursor = match.end() + (size if size < 200 else 0)
            lines.append(data[match.end() : cursor].decode("utf-8", errors="replace"))
    chapters = re.split(r"\n(?=(?:CHAPTER|Chapter) )", "\n".join(lines))
    for number, chapter in enumerate(chapters):
        if len(chapter) > 2000:
            yield f"chapter-{number}", chapter


def is_held_out(name: str) -> bool:
    """Return whether a document belongs to the 5 % that training never sees."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


# ---- tokens ----------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 4,096 pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[tuple[str, str]], seed: int) -> torch.Tensor:
    """Return all documents as one stream of token ids, shuffled and separated by end-of-text."""
    order = sorted(documents)
    random.Random(seed).shuffle(order)
    ids: list[int] = []
    for encoded in tokenizer([text for _, text in order])["input_ids"]:
        ids += [tokenizer.eos_token_id, *encoded]
    return torch.tensor(ids)


def batches(streams: dict[str, torch.Tensor], size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches `[size, SEQUENCE_LENGTH + 1]`, the share of each kind of text as in `MIX`."""
    generator = random.Random(seed)
    while True:
        kinds = generator.choices(list(MIX), weights=list(MIX.values()), k=size)
        rows = []
        for kind in kinds:
            start = generator.randrange(len(streams[kind]) - SEQUENCE_LENGTH - 1)
            rows.append(streams[kind][start : start + SEQUENCE_LENGTH + 1])
        yield torch.stack(rows)


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for matrices (Jordan et al. 2024), in float32.

    torch.optim.Muon iterates in bfloat16, which CPUs without bfloat16 instructions emulate a hundred times slower.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update to every matrix."""
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalize(parameter.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalize(matrix: torch.Tensor, iterations: int = 4) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrix, roughly, by a quintic Newton-Schulz iteration."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


# ---- training --------------------------------------------------------------------------------------------------


def build(tokenizer: PreTrainedTokenizerFast, **shape: int) -> LlamaForCausalLM:
    """Return a fresh Llama of the given shape."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",
        **shape,
    )
    return LlamaForCausalLM(config)


def optimize(
    model: LlamaForCausalLM, data: Iterator[torch.Tensor], steps: int, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Run `steps` updates: Muon for matrices, AdamW for the rest; warm-up, constant, linear decay."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started = time.perf_counter()
    model.train()
    for step in range(steps):
        factor = min(1.0, (step + 1) / 50, (steps - step) / (0.4 * steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        loss = loss_of(next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.perf_counter() - started:6.0f} s", flush=True)
    model.eval()


def cross_entropy(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the next-token loss in nats."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def distillation(draft: LlamaForCausalLM, target: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean KL(target || draft) over all positions."""
    with torch.no_grad():
        wanted = target(rows[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    got = draft(rows[:, :-1], use_cache=False).logits.float().log_softmax(-1)
    return (wanted.exp() * (wanted - got)).sum(-1).mean()


@torch.no_grad()
def write_own_text(target: LlamaForCausalLM, data: Iterator[torch.Tensor], rows: int) -> torch.Tensor:
    """Return `[rows, SEQUENCE_LENGTH + 1]` ids: 64 of real text, the rest by the target, half greedy, half sampled."""
    written = []
    while sum(len(part) for part in written) < rows:
        prompt = torch.cat([next(data)[:, :64] for _ in range(6)])
        written.append(continued(target, prompt, do_sample=False))
        written.append(continued(target, prompt, do_sample=True))
        print(f"own text: {sum(len(part) for part in written)} rows", flush=True)
    return torch.cat(written)[:rows]


def continued(target: LlamaForCausalLM, prompt: torch.Tensor, *, do_sample: bool) -> torch.Tensor:
    """Return `prompt` `[B, 64]` with the target's own continuation, `[B, SEQUENCE_LENGTH + 1]`."""
    num_new = SEQUENCE_LENGTH + 1 - prompt.shape[1]
    mask = torch.ones_like(prompt)
    lengths = {"min_new_tokens": num_new, "max_new_tokens": num_new}
    return target.generate(prompt, attention_mask=mask, do_sample=do_sample, top_k=0, **lengths)


def mixed_rows(real: Iterator[torch.Tensor], own: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield batches of which three quarters were written by the target."""
    generator = torch.Generator().manual_seed(3)
    while True:
        batch = next(real)
        size = 3 * len(batch) // 4
        picked = own[torch.randint(len(own), (size,), generator=generator)]
        yield torch.cat([picked, batch[size:]])


@torch.no_grad()
def report(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, streams: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    """Return held-out losses in nats per token and the expected acceptance rate (sum of minima), per kind."""
    result = {}
    for kind, stream in streams.items():
        count = min(16, (len(stream) - 1) // SEQUENCE_LENGTH)
        rows = torch.stack([stream[i * SEQUENCE_LENGTH : (i + 1) * SEQUENCE_LENGTH + 1] for i in range(count)])
        target_logits, draft_logits = target(rows[:, :-1]).logits, draft(rows[:, :-1]).logits
        overlap = torch.minimum(target_logits.softmax(-1), draft_logits.softmax(-1)).sum(-1).mean()
        agreement = (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean()
        labels = rows[:, 1:].flatten()
        result[kind] = {
            "target_loss": functional.cross_entropy(target_logits.flatten(0, 1), labels).item(),
            "draft_loss": functional.cross_entropy(draft_logits.flatten(0, 1), labels).item(),
            "overlap": overlap.item(),
            "greedy_agreement": agreement.item(),
        }
    return result


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bf16 beside the tokenizer."""
    model.config._attn_implementation = "sdpa"
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Train both models and write them to `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debian", type=Path, required=True, help="folder with the two unpacked Debian packages")
    parser.add_argument("--output", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--target-steps", type=int, default=420)
    parser.add_argument("--draft-steps", type=int, default=240, help="steps on the corpus")
    parser.add_argument("--own-steps", type=int, default=320, help="further steps on the target's own text")
    parser.add_argument("--own-rows", type=int, default=1296)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    code = list(read_code())
    documents = {
        "code": code,
        "docs": list(read_docs(options.debian)),
        "json": list(read_json(code)),
        "prose": list(read_prose(options.debian)),
    }
    for kind, entries in documents.items():
        print(f"{kind}: {len(entries)} documents, {sum(len(text) for _, text in entries) / 1e6:.1f} MB")
    seen = {kind: [d for d in entries if not is_held_out(d[0])] for kind, entries in documents.items()}
    held_out = {kind: [d for d in entries if is_held_out(d[0])] for kind, entries in documents.items()}
    tokenizer = train_tokenizer([text for entries in seen.values() for _, text in entries])
    streams = {kind: encode(tokenizer, entries, seed=0) for kind, entries in seen.items()}

    target = build(
        tokenizer,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=704,
    )
    draft = build(
        tokenizer,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=384,
    )
    optimize(target, batches(streams, 12, seed=1), options.target_steps, lambda rows: cross_entropy(target, rows))
    target.save_pretrained(options.output / "target")
    tokenizer.save_pretrained(options.output / "target")
    own = write_own_text(target, batches(streams, 12, seed=2), options.own_rows)
    learn = lambda rows: distillation(draft, target, rows)  # noqa: E731
    optimize(draft, batches(streams, 12, seed=4), options.draft_steps, learn)
    optimize(draft, mixed_rows(batches(streams, 12, seed=5), own), options.own_steps, learn)

    measured = report(target, draft, {kind: encode(tokenizer, d, seed=0) for kind, d in held_out.items()})
    print(json.dumps(measured, indent=2))
    save(target, tokenizer, options.output / "target")
    save(draft, tokenizer, options.output / "draft")
    (options.output / "training.json").write_text(json.dumps(measured, indent=2) + "\n")
    print(f"parameters: target {target.num_parameters():,}, draft {draft.num_parameters():,}")
    assert all(math.isfinite(value) for kind in measured.values() for value in kind.values())


if __name__ == "__main__":
    main()
