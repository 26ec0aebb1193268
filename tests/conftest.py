"""What every test gets: one thread, no network, and tiny models."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub: look-ups of names that are no local folders then fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before anything imports torch: the suite runs in a process per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import models


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Threads of several test processes would spin against each other; on tiny models they win nothing."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make connections to other machines an error."""
    connect = socket.socket.connect

    def guarded_connect(self: socket.socket, address: Any) -> None:
        is_local = self.family == getattr(socket, "AF_UNIX", None) or address[0] in {"localhost", "127.0.0.1", "::1"}
        if not is_local:
            raise RuntimeError(f"Tests must not use the network, but something connects to {address!r}.")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def real_data() -> Path:
    """Return the folder of real trained models and prompts that is not part of the repository, or skip."""
    checkout = Path(__file__).parents[1]
    candidates = [checkout / "shared" / "data", checkout.parent / "shared" / "data"]
    if override := os.environ.get("HF_SPECDEC_REAL_DATA"):
        candidates = [Path(override)]
    for folder in candidates:
        if folder.is_dir():
            return folder
    pytest.skip(f"needs real models, and none of {', '.join(map(str, candidates))} exists")


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Return a fresh tiny Llama in float32."""
    return models.build_target()


@pytest.fixture
def drafts(target: LlamaForCausalLM) -> dict[str, LlamaForCausalLM]:
    """Return "identical", "unrelated" and "noisy" drafts of `target`."""
    return models.build_drafts(target)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the 64-id character tokenizer that fits `target`."""
    return models.build_tokenizer()
