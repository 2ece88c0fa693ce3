"""Where the patches of a packed batch of images lie: segments, windows, positions, rotary angles.

Legend: n = images and videos, P = patches, m = merge_size, G = P / m^2 merged units (language-model
tokens). Patches come in the processor's order: frames, then merged units row by row, then the m x m
patches of a unit.

Method: Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL
(https://arxiv.org/abs/2502.13923), as in transformers' get_window_index and rot_pos_emb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack

from vlmkernels._native import _C, check_whole, pointer, to_device
from vlmkernels.rotary import frequencies


@dataclass(frozen=True, eq=False)
class VisionLayout:
    """Built once per forward from grid_thw on the host; `to(device)` moves it without a sync."""

    num_patches: int
    #: int32 [frames + 1]: segments of full attention, one per temporal slice
    cu_seqlens: Tensor
    #: int32 [windows + 1]: segments of window attention, in window order; None without windows
    cu_window_seqlens: Tensor | None
    #: int64 [G]: permutation of the units into window order, x.view(G, m * m, -1)[window_index]
    window_index: Tensor | None
    #: int64 [G]: its inverse, which puts merged rows back; None without windows
    reverse_index: Tensor | None
    #: int64 [P, 2]: (row, column) of each patch in its frame, in patch order, not window order
    position_ids: Tensor
    merge_size: int = 2
    #: lengths of the longest segments, for kernels that would have to ask the device
    max_seqlen: int = 0
    max_window_seqlen: int = 0
    #: int32 [P]: the same permutation of the patches; None without windows and where the patches
    #: stand in window order already (in_window_order)
    window_order: Tensor | None = None
    #: patches along the longest side: positions are below it
    max_side: int = 0
    _tables: dict[tuple[int, float], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __eq__(self, other: object) -> bool:
        """Whether all is alike, the device of the tensors too."""
        if not isinstance(other, VisionLayout):
            return NotImplemented
        names = [f.name for f in fields(self) if f.compare]
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        return hash((self.num_patches, self.merge_size, self.max_seqlen, self.max_window_seqlen))

    @staticmethod
    def from_grid(
        grid_thw: Tensor | Sequence[Sequence[int]],
        *,
        patch_size: int = 14,
        merge_size: int = 2,
        window_size: int | None = None,
    ) -> VisionLayout:
        """
        Args:
            grid_thw: [n, 3], int64 on the CPU or nested lists: frames, patch rows, patch columns of
                each image or video; n may be 0.
            patch_size: pixels along a patch's side; only windows need it.
            merge_size: patches along a merged unit's side.
            window_size: pixels along a window's side (112 in Qwen2.5-VL), or None for no windows.

        Raises:
            TypeError: grid_thw is None.
            ValueError: a grid's shape or sizes don't fit, a size is no whole number, or the window
                is smaller than a unit.
        """
        grid = _check_grid(grid_thw, merge_size).contiguous()
        side = _window_side(window_size, patch_size, merge_size)
        head = (pointer(grid), len(grid), merge_size, side)
        frames, units, windows, max_frame, max_window, max_side = _C.vision_layout_sizes(*head)
        patches = units * merge_size**2
        positions = torch.empty(patches, 2, dtype=torch.int64, device="cpu")
        cu_seqlens = torch.empty(frames + 1, dtype=torch.int32, device="cpu")
        cu_window = index = reverse = order = None
        if side:
            cu_window = torch.empty(windows + 1, dtype=torch.int32, device="cpu")
            index, reverse = torch.empty(2, units, dtype=torch.int64, device="cpu")
            order = torch.empty(patches, dtype=torch.int32, device="cpu")
        outputs = (positions, cu_seqlens, cu_window, index, reverse, order)
        _C.vision_layout_fill(*head, *map(pointer, outputs))
        return VisionLayout(
            num_patches=patches,
            cu_seqlens=cu_seqlens,
            cu_window_seqlens=cu_window,
            window_index=index,
            reverse_index=reverse,
            position_ids=positions,
            merge_size=merge_size,
            max_seqlen=max_frame,
            max_window_seqlen=max_window,
            window_order=order,
            max_side=max_side,
        )

    def segments(self, window: bool) -> tuple[Tensor, Tensor | None, int]:
        """cu_seqlens, the order that they follow (None: as the patches stand) and the longest
        segment, of windows or of frames.

        Raises:
            ValueError: windows of a layout that has none.
        """
        if not window:
            return self.cu_seqlens, None, self.max_seqlen
        if self.cu_window_seqlens is None:
            raise ValueError("window is True, but the layout was made without a window_size")
        return self.cu_window_seqlens, self.window_order, self.max_window_seqlen

    def rotary(self, head_dim: int, theta: float = 1e4, *, windowed: bool) -> Tensor:
        """The angles of the 2D rotary embedding.

        Args:
            head_dim: a multiple of 4.
            theta: base of the frequencies.
            windowed: in window order, else in patch order.

        Returns:
            float32 [P, head_dim // 2] on position_ids' device: head_dim / 4 angles of the row, then
            as many of the column. cos and sin take them doubled to head_dim (rotate-half).

        Raises:
            ValueError: head_dim is no multiple of 4, or windowed without a window_size.
        """
        radians = frequencies(head_dim, theta, self.position_ids.device)
        angles = (self.position_ids[..., None].float() * radians).flatten(1)
        if not windowed:
            return angles
        if self.window_index is None:
            raise ValueError("windowed is True, but this layout was made without a window_size")
        if self.window_order is None:  # position_ids stand in window order already
            return angles
        units = angles.view(-1, self.merge_size**2, angles.shape[1])
        return units[self.window_index].view_as(angles)

    def rotary_table(self, head_dim: int, theta: float = 1e4) -> Tensor:
        """What vision_attention rotates q and k by; made at the first call, then kept (not under
        torch.compile).

        Args:
            head_dim: a multiple of 4.
            theta: base of the frequencies.

        Returns:
            float32 [P, head_dim] on position_ids' device, in their order: of each patch the cosines
            of rotary()'s head_dim / 2 angles, then their sines.

        Raises:
            ValueError: head_dim is no multiple of 4.
        """
        key = (head_dim, theta)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # so that training can use it afterwards
                return self.rotary_table(head_dim, theta)
        if key not in self._tables:
            positions = torch.arange(self.max_side, device=self.position_ids.device)
            angles = positions[:, None] * frequencies(head_dim, theta, positions.device)
            both = torch.cat((angles.cos(), angles.sin()))  # [2 max_side, D / 4]
            # Every sine and cosine is computed once per position, then looked up: [P, 4, D / 4].
            rows = torch.cat((self.position_ids, self.position_ids + self.max_side), -1)
            table = torch.nn.functional.embedding(rows, both)
            table = table.view(self.num_patches, head_dim)
            # Of a tracer such as torch.export, of torch.func.functionalize, or of inference mode,
            # which a compiler can't see; of a CUDA graph, which has not run yet.
            compiling = torch.compiler.is_compiling()
            if compiling or type(table) is not Tensor or get_interpreter_stack():
                return table  # not for calls after it
            if table.is_cuda and torch.cuda.is_current_stream_capturing():
                return table
            self._tables[key] = table
        return self._tables[key]

    def in_window_order(self) -> VisionLayout:
        """The layout of patches that already stand in window order: position_ids follow them, and
        window_order is None, because nothing is left to permute. Without windows, itself."""
        if self.window_index is None or self.window_order is None:
            return self
        units = self.position_ids.view(-1, self.merge_size**2, 2)
        positions = units[self.window_index].view_as(self.position_ids)
        return replace(self, position_ids=positions, window_order=None)

    def padded(self, units: int) -> VisionLayout:
        """The layout of a batch with `units` more merged units at its end: one segment and one
        window of their own, at position (0, 0).

        Raises:
            ValueError: the layout is not in host memory.
        """
        if not units:
            return self
        if self.cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"the layout is on {self.cu_seqlens.device}; pad it before it is moved"
            )
        old, extra = self.num_patches, units * self.merge_size**2
        end = self.cu_seqlens.new_tensor([old + extra])
        tail = torch.arange(old, old + extra, device="cpu")
        unit_tail = tail[:: self.merge_size**2] // self.merge_size**2

        def append(x: Tensor | None, more: Tensor) -> Tensor | None:
            return None if x is None else torch.cat([x, more.to(x.dtype)])

        return replace(
            self,
            num_patches=old + extra,
            cu_seqlens=torch.cat([self.cu_seqlens, end]),
            cu_window_seqlens=append(self.cu_window_seqlens, end),
            window_index=append(self.window_index, unit_tail),
            reverse_index=append(self.reverse_index, unit_tail),
            window_order=append(self.window_order, tail),
            position_ids=torch.cat([self.position_ids, self.position_ids.new_zeros(extra, 2)]),
            max_seqlen=max(self.max_seqlen, extra),
            max_window_seqlen=max(self.max_window_seqlen, extra)
            if self.window_index is not None
            else 0,
            max_side=max(self.max_side, 1),
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> VisionLayout:
        """The same layout on another device; on CUDA the host doesn't wait if `non_blocking`."""
        names = ("cu_seqlens", "cu_window_seqlens", "window_index", "reverse_index")
        moved = {
            name: to_device(tensor, device) if non_blocking else tensor.to(device)
            for name in (*names, "window_order", "position_ids")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **moved)


def layout_reference(
    grid_thw: Tensor | Sequence[Sequence[int]],
    *,
    patch_size: int = 14,
    merge_size: int = 2,
    window_size: int | None = None,
) -> VisionLayout:
    """What VisionLayout.from_grid means, in plain torch: tests and documentation."""
    grid = _check_grid(grid_thw, merge_size)
    side = _window_side(window_size, patch_size, merge_size)
    # One row per frame: everything below works on all frames at once.
    frames = grid[:, 1:].repeat_interleave(grid[:, 0], dim=0)  # [F, 2]
    patches = frames.prod(1)
    units = patches // merge_size**2
    total_units = int(units.sum())
    unit_rows, unit_columns = (frames // merge_size).unbind(1)

    frame_of_unit = torch.arange(len(frames)).repeat_interleave(units)  # [G]
    first_unit = units.cumsum(0) - units
    index = torch.arange(total_units) - first_unit[frame_of_unit]
    row = index // unit_columns[frame_of_unit]
    column = index % unit_columns[frame_of_unit]

    inside = torch.arange(merge_size)
    unit = torch.stack(torch.meshgrid(inside, inside, indexing="ij"), -1).view(1, -1, 2)
    corner = torch.stack((row, column), -1)[:, None] * merge_size
    layout = VisionLayout(
        num_patches=total_units * merge_size**2,
        cu_seqlens=_cumulative(patches),
        cu_window_seqlens=None,
        window_index=None,
        reverse_index=None,
        position_ids=(corner + unit).view(-1, 2),
        merge_size=merge_size,
        max_seqlen=int(patches.max()) if len(patches) else 0,
        max_side=int(frames.max()) if len(frames) else 0,
    )
    if not side:
        return layout

    windows_down = (unit_rows + side - 1) // side
    windows_across = (unit_columns + side - 1) // side
    windows = windows_down * windows_across
    first_window = windows.cumsum(0) - windows
    window = (
        first_window[frame_of_unit] + row // side * windows_across[frame_of_unit] + column // side
    )
    # Inside a window the units keep their order. Windows are never empty here: transformers'
    # padding makes empty ones, whose repeated cu_seqlens have to be dropped.
    window_index = window.argsort(stable=True)
    reverse_index = torch.empty_like(window_index)
    reverse_index[window_index] = torch.arange(total_units)
    lengths = window.bincount(minlength=int(windows.sum())) * merge_size**2
    return replace(
        layout,
        cu_window_seqlens=_cumulative(lengths),
        window_index=window_index,
        reverse_index=reverse_index,
        max_window_seqlen=int(lengths.max()) if len(lengths) else 0,
        window_order=(window_index[:, None] * merge_size**2 + torch.arange(merge_size**2))
        .flatten()
        .int(),
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and torch.equal(one, other)
    return one is other or (type(one) is type(other) and one == other)


def _window_side(window_size: int | None, patch_size: int, merge_size: int) -> int:
    """Merged units along a window's side; 0 for no windows."""
    if window_size is None:
        return 0
    check_whole(window_size=window_size, patch_size=patch_size)
    if patch_size < 1:
        raise ValueError(f"patch_size is {patch_size}; it must be at least 1")
    side = window_size // patch_size // merge_size
    if side < 1:
        raise ValueError(
            f"window_size is {window_size} pixels; it must be at least one merged unit, "
            f"{patch_size * merge_size} pixels"
        )
    return side


def _check_grid(grid_thw: Tensor | Sequence[Sequence[int]], merge_size: int) -> Tensor:
    check_whole(merge_size=merge_size)
    if grid_thw is None:
        raise TypeError("grid_thw is None; it must be integers [n, 3]")
    try:
        grid = grid_thw if isinstance(grid_thw, Tensor) else torch.tensor(grid_thw, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"grid_thw is {grid_thw!r}; it must be integers [n, 3]") from None
    if grid.numel() == 0:
        grid = torch.empty(0, 3, dtype=torch.int64, device="cpu")
    if grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
        raise ValueError(
            f"grid_thw is {str(grid.dtype)[6:]} {list(grid.shape)}; it must be integers [n, 3]"
        )
    grid = grid.to("cpu", torch.int64)
    if merge_size < 1:
        raise ValueError(f"merge_size is {merge_size}; it must be at least 1")
    bad = (grid < 1).any(1) | (grid[:, 1:] % merge_size).any(1)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"grid_thw[{i}] is {grid[i].tolist()}; t, h and w must be at least 1, and h and w "
            f"multiples of merge_size = {merge_size}"
        )
    if grid.double().prod(1).sum() >= 2**31:  # in float64, which does not wrap around
        patches = sum(t * h * w for t, h, w in grid.tolist())
        raise ValueError(f"grid_thw has {patches} patches; a batch must have less than 2^31")
    return grid


def _cumulative(lengths: Tensor) -> Tensor:
    """[n] lengths -> int32 [n + 1] running sums from 0."""
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=cu_seqlens[1:])
    return cu_seqlens
