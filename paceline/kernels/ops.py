"""The kernels of `rows.c` as torch sees them: a product, and a whole pass of a decoder or a draft.

Everything here is float32 on the CPU and for inference only. Each has a twin in plain torch, which tests hold it
against: `product_twin` here, the modules of models/decoder.py and models/feature.py for passes. What a row gives does
not depend on the rows beside it, bit for bit: see rows.c.

Shapes: N rows, H hidden size, O outputs, I inputs, S slots, K key/value heads, C capacity, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_long, c_void_p
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from paceline.kernels import build
from paceline.kernels.matrix import FORMATS, Matrix, rounded

Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""In the order of the enumeration in rows.c."""


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("data", "bias")),
        *((name, c_int32) for name in ("format", "inputs", "outputs", "int8_inputs")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("q", "k", "v", "output")),
        *((name, c_void_p) for name in ("norm", "post_norm", "q_norm", "k_norm")),
        *((name, c_float) for name in ("eps", "scale", "softcap")),
        ("head_dim", c_int32),
    )


class _MLP(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("gate", "up", "down")),
        *((name, c_void_p) for name in ("norm", "post_norm")),
        ("eps", c_float),
        ("activation", c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (("attention", _Attention), ("mlp", _MLP), ("kind", c_int32))


class _Cache(ctypes.Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("capacity", c_int64), ("half", c_int32))


class _Places(ctypes.Structure):
    _fields_ = (*((name, c_void_p) for name in ("chunks", "cos", "sin", "inputs")), ("count", c_int32))


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in ("embedding", "head", "mix")),
        *((name, c_void_p) for name in ("layers", "last_norm", "embedding_norm", "given_norm")),
        *((name, c_int64) for name in ("count", "scratch")),
        *((name, c_float) for name in ("embedding_scale", "eps")),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("kinds", "caches", "tokens", "given", "captured", "wanted")),
        *((name, c_void_p) for name in ("x", "kept", "logits")),
        *((name, c_int64) for name in ("rows", "captures", "outputs")),
        ("mixes", c_int32),
    )


def _pointer(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def product(x_NI: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias: [N, O]. By the kernels where they are, by torch where not."""
    if torch.compiler.is_compiling():
        found_NO: torch.Tensor = torch.ops.paceline.product(
            x_NI, matrix.data, bias, matrix.format, matrix.outputs, matrix.int8_inputs
        )
        return found_NO
    return _multiplied(x_NI, matrix, bias)  # through torch it takes 0.1 ms more, in cold caches


def product_twin(x_NI: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(rounded(x_NI) if matrix.rounds else x_NI, matrix.unpack(), bias)


def _product(
    x_NI: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, format: str, outputs: int, int8_inputs: bool
) -> torch.Tensor:
    matrix = Matrix(format=format, outputs=outputs, inputs=x_NI.shape[1], data=data, int8_inputs=int8_inputs)
    return _multiplied(x_NI, matrix, bias)


def _multiplied(x_NI: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    assert x_NI.dtype == torch.float32
    if not build.available():
        return product_twin(x_NI, matrix, bias)
    rows = len(x_NI)
    x_NI, y_NO = x_NI.contiguous(), torch.empty(rows, matrix.outputs)
    build.library().paceline_product(
        ctypes.byref(Projection(matrix=matrix, bias=bias).struct),
        c_void_p(_pointer(x_NI)),
        c_long(rows),
        c_void_p(_pointer(y_NO)),
        torch.get_num_threads(),
    )
    return y_NO


_library = torch.library.Library("paceline", "DEF")
_library.define("product(Tensor x, Tensor data, Tensor? bias, str format, int outputs, bool int8_inputs) -> Tensor")
_library.impl("product", _product, "CPU")
torch.library.register_fake(
    "paceline::product", lambda x, data, bias, format, outputs, _: x.new_empty(x.shape[0], outputs), lib=_library
)


def rows(matrix: Matrix, indices_N: torch.Tensor) -> torch.Tensor:
    """[N, I] in float32: these rows of the matrix itself, which are its own `Matrix.rows`, sooner."""
    found_NI = torch.empty(len(indices_N), matrix.inputs)
    build.library().paceline_rows(
        ctypes.byref(Projection(matrix=matrix).struct),
        c_void_p(_pointer(indices_N)),
        c_long(len(indices_N)),
        c_void_p(_pointer(found_NI)),
    )
    return found_NI


def norm(x_NH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., H] the RMS norm of each row, in one call instead of torch's several; H is a multiple of 16."""
    assert x_NH.dtype == torch.float32
    x_NH, y_NH = x_NH.contiguous(), torch.empty(x_NH.shape)
    size = len(weight_H)
    rows = x_NH.numel() // size
    build.library().paceline_norm(
        c_void_p(x_NH.data_ptr()),
        c_void_p(_pointer(weight_H)),
        c_float(eps),
        c_long(size),
        c_long(rows),
        c_void_p(y_NH.data_ptr()),
    )
    return y_NH


def can_attend(head_dim: int) -> bool:
    """Whether heads of this size are what the compiled kernels can take."""
    return head_dim % int(build.library().paceline_lanes()) == 0


def can_halve() -> bool:
    """Whether caches may be float16 here."""
    return bool(build.library().paceline_has_halves())


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A packed matrix and its bias [O]."""

    matrix: Matrix
    bias: torch.Tensor | None = None

    @property
    def struct(self) -> _Matrix:
        m = self.matrix
        format = FORMATS.index(m.format)
        return _Matrix(_pointer(m.data), _pointer(self.bias), format, m.inputs, m.outputs, m.int8_inputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention:
    """x + post_norm(output(softmax(q k) v)), each a projection of norm(x); `softcap` bounds the scores.

    Without a norm, what q, k and v multiply is given with each pass (see `Places`).
    """

    q: Projection
    k: Projection
    v: Projection
    output: Projection
    norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    scale: float
    softcap: float | None
    head_dim: int


@dataclass(frozen=True, kw_only=True, eq=False)
class MLP:
    """x + post_norm(down(activation(gate) * up)), gate and up projections of norm(x)."""

    gate: Projection
    up: Projection
    down: Projection
    norm: torch.Tensor
    post_norm: torch.Tensor | None
    eps: float
    activation: Activation


class Caches:
    """The keys and values of every layer, [S, K, C, D] each, in float32 or float16."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._kept = (keys, values)
        structs = [
            _Cache(_pointer(k_SKCD), _pointer(v_SKCD), k_SKCD.shape[2], k_SKCD.dtype == torch.float16)
            for k_SKCD, v_SKCD in zip(keys, values, strict=True)
        ]
        self.array = (_Cache * len(structs))(*structs)


class Places:
    """Where the rows of a pass belong, for the layers of one kind: one window and one rotation.

    `chunks`: (tokens, slot, first position) of each, one behind the other. `rotation`: cos and sin of every position up
    to the last, [P, 1, D], the first half of sin negated. `inputs`: what q, k and v multiply, [N, inputs of q]; None:
    norm(x).
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, int, int]],
        window: int | None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        inputs_NI: torch.Tensor | None = None,
    ) -> None:
        array = (c_int32 * (4 * len(chunks)))(*(number for chunk in chunks for number in (*chunk, window or 0)))
        cos, sin = rotation or (None, None)
        self._kept = (array, rotation, inputs_NI)
        self.struct = _Places(ctypes.addressof(array), _pointer(cos), _pointer(sin), _pointer(inputs_NI), len(chunks))


class Model:
    """A decoder, or a draft of one layer, from tokens to logits in one call. `kinds[i]` says which of a pass's places
    hold for layer i; `last_norm` stands behind the last layer.

    `mix`, `embedding_norm` and `given_norm` are those of a draft that is given states beside tokens: its layer adds to
    these states, and reads norm(token's row) and norm(states) side by side.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Attention, MLP]],
        kinds: Sequence[int],
        *,
        embedding: Matrix,
        head: Matrix,
        last_norm: torch.Tensor | None,
        embedding_scale: float = 1.0,
        mix: Projection | None = None,
        embedding_norm: torch.Tensor | None = None,
        given_norm: torch.Tensor | None = None,
    ) -> None:
        structs = [_layer(*layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
        array = (_Layer * len(structs))(*structs)
        self._kept = (layers, array, embedding, head, last_norm, mix, embedding_norm, given_norm)
        self._struct = _Model(
            *(Projection(matrix=matrix).struct for matrix in (embedding, head)),
            _Matrix() if mix is None else mix.struct,
            ctypes.addressof(array),
            *map(_pointer, (last_norm, embedding_norm, given_norm)),
            len(layers),
            max(_scratch(*layer) for layer in layers),
            embedding_scale,
            layers[0][1].eps,
        )
        self._depth, self._hidden, self._outputs = len(layers), head.inputs, head.outputs
        self._call = build.library().paceline_run
        self._call.argtypes = (c_void_p, c_void_p, ctypes.c_int)
        self._call.restype = c_long

    def __call__(
        self,
        places: Sequence[Places],
        caches: Caches,
        *,
        tokens: Sequence[int] | None,
        given: torch.Tensor | None = None,
        captured: Sequence[int] = (),
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(logits [O, outputs] of the O rows `wanted`; x [N, H] as the last layer gives it; states [N, F, H] behind as
        many layers as each of `captured` says, behind all layers those behind the last norm). Keys and values are
        written into their caches.

        `given`: [N, H], or [N, F, H], which `mix` makes [N, H] of. Without `tokens` it is what the first layer takes.
        """
        assert self._depth == len(caches.array)
        assert all(0 <= index <= self._depth for index in captured)
        assert given is None or given.dtype == torch.float32
        rows = len(given if tokens is None else tokens)  # type: ignore[arg-type]
        x_NH, logits_OV = torch.empty(rows, self._hidden), torch.empty(len(wanted), self._outputs)
        kept_NFH = torch.empty(rows, len(captured), self._hidden) if captured else None
        kinds = (_Places * len(places))(*(place.struct for place in places))
        indices, outputs = (c_int32 * len(captured))(*captured), (c_int64 * len(wanted))(*wanted)
        read = None if tokens is None else (c_int64 * rows)(*tokens)
        held = _Pass(
            ctypes.addressof(kinds),
            ctypes.addressof(caches.array),
            None if read is None else ctypes.addressof(read),
            _pointer(given),
            ctypes.addressof(indices),
            ctypes.addressof(outputs),
            x_NH.data_ptr(),
            _pointer(kept_NFH),
            logits_OV.data_ptr(),
            rows,
            len(captured),
            len(wanted),
            given is not None and given.dim() == 3,
        )
        if missing := self._call(ctypes.addressof(self._struct), ctypes.addressof(held), torch.get_num_threads()):
            raise MemoryError(
                f"a pass over {rows} tokens needs {missing:,} bytes more than there are: read fewer at once"
            )
        return logits_OV, x_NH, kept_NFH


def _layer(a: Attention, m: MLP, kind: int) -> _Layer:
    attention = _Attention(
        *(part.struct for part in (a.q, a.k, a.v, a.output)),
        *map(_pointer, (a.norm, a.post_norm, a.q_norm, a.k_norm)),
        a.eps,
        a.scale,
        a.softcap or 0.0,
        a.head_dim,
    )
    mlp = _MLP(
        *(part.struct for part in (m.gate, m.up, m.down)),
        *map(_pointer, (m.norm, m.post_norm)),
        m.eps,
        ACTIVATIONS.index(m.activation),
    )
    return _Layer(attention, mlp, kind)


def _scratch(a: Attention, m: MLP) -> int:
    """Numbers that a row needs between the products of a layer."""
    hidden = a.output.matrix.outputs
    attention = 2 * hidden + 2 * a.q.matrix.outputs + a.k.matrix.outputs + a.v.matrix.outputs
    return max(attention, 2 * hidden + 2 * m.gate.matrix.outputs)
