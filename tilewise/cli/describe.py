"""``tilewise cost`` and ``tilewise explain``: a call described by options, and not made."""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer
from typer import Option


class Dtype(str, Enum):
    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def described(
    batch: Annotated[int, Option(min=0, help="Batch entries.")] = 1,
    heads: Annotated[int, Option(min=0, help="Query heads.")] = 8,
    kv_heads: Annotated[int | None, Option(min=0, help="Key heads.", show_default="heads")] = None,
    seqlen: Annotated[int, Option(min=0, help="Queries of an entry.")] = 4096,
    kv_seqlen: Annotated[
        int | None, Option(min=0, help="Keys of an entry.", show_default="seqlen")
    ] = None,
    head_dim: Annotated[int, Option(min=1, help="Width of q and k.")] = 64,
    value_dim: Annotated[
        int | None, Option(min=1, help="Width of v.", show_default="head-dim")
    ] = None,
    dtype: Annotated[Dtype, Option(help="Of q, k and v.")] = Dtype.BFLOAT16,
    causal: Annotated[bool, Option("--causal", help="A row sees no later key.")] = False,
    window: Annotated[
        str | None,
        Option(metavar="L,R", help="Keys seen before and after, as 127,0; an empty side is open."),
    ] = None,
    device: Annotated[
        str,
        Option(help="Where the tensors would be; they are never filled, on meta not even made."),
    ] = "cpu",
    backend: Annotated[
        str | None, Option(help="Insist on this one.", show_default="chosen")
    ] = None,
) -> dict[str, Any]:
    """The arguments of the call that the options describe."""
    import torch

    kv_heads = heads if kv_heads is None else kv_heads
    kv_seqlen = seqlen if kv_seqlen is None else kv_seqlen
    value_dim = head_dim if value_dim is None else value_dim

    def empty(*shape: int) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=getattr(torch, dtype.value), device=device)
        except (RuntimeError, AssertionError) as error:  # no such device, or no room there
            reason = str(error).splitlines()[0]
            raise ValueError(f"no tensor {shape} on device {device!r}: {reason}") from None

    return {
        "q": empty(batch, seqlen, heads, head_dim),
        "k": empty(batch, kv_seqlen, kv_heads, head_dim),
        "v": empty(batch, kv_seqlen, kv_heads, value_dim),
        "causal": causal,
        "window_size": (None, None) if window is None else _window(window),
        "backend": backend,
    }


def _window(text: str) -> tuple[int | None, ...]:
    try:
        left, right = (int(side) if side.strip() else None for side in text.split(","))
    except ValueError:
        raise ValueError(f"--window must be two numbers L,R, as 127,0; got {text!r}") from None
    return left, right


def about_a_call(command: Callable[..., object]) -> Callable[..., None]:
    """A command that prints `command` of the call described, and takes its other options too."""
    _, *own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        others = {option.name: options.pop(option.name) for option in own}
        try:
            typer.echo(str(command(described(**options), **others)))
        except ValueError as error:
            typer.echo(f"tilewise: {error}", err=True)
            raise typer.Exit(2) from None

    parameters = [*inspect.signature(described).parameters.values(), *own]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in parameters}
    return run


@about_a_call
def cost(
    call: dict[str, Any],
    block_q: Annotated[int, Option(min=1, help="Rows of a tile.")] = 128,
    block_k: Annotated[int, Option(min=1, help="Keys of a tile.")] = 128,
    sram: Annotated[int, Option(min=1, help="On-chip memory of the model, KiB.")] = 100,
) -> object:
    """Show FLOPs, bytes moved and bytes kept, by the standard form and by tiles."""
    import tilewise

    return tilewise.cost(**call, block_q=block_q, block_k=block_k, sram_bytes=1024 * sram)


@about_a_call
def explain(call: dict[str, Any]) -> object:
    """Show which backend would serve a call, how, and why the ones before it do not."""
    import tilewise

    return tilewise.explain(**call)
