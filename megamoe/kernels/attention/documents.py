"""Documents that are packed into one sequence: where each begins, in the forms that attention takes."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 256  # tokens: shorter documents are taken together, by a mask of at most this size


class Documents(NamedTuple):
    """The documents of B sequences of S tokens; a document does not go on in the next sequence.

    All sizes are linear in the number of tokens. It is a tuple, so that DeepSpeed's ZeRO 3, which walks
    through the inputs of every module, recognises it.

    start_BS: int32, contiguous, the position in its sequence at which each token's document begins.
    bounds: where documents begin among the B * S tokens, sequence by sequence, and the end B * S.
    bounds_D: the same, int32 [D + 1] for D documents, on the device of start_BS.
    """

    start_BS: Tensor
    bounds: tuple[int, ...]
    bounds_D: Tensor

    @classmethod
    def of(cls, start_BS: Tensor, device: torch.device | str = "cpu") -> "Documents":
        """Return the documents for attention on `device`.

        start_BS: integers [B, S] on the CPU, as in the class. On the CPU, because the lengths are read there:
        a tensor on CUDA would make the host wait.

        Raises:
            ValueError: if a value is not the position of the token that begins the document.
        """
        place_S = torch.arange(start_BS.shape[1])
        begins_BS = start_BS == place_S
        expected_BS = torch.where(begins_BS, place_S, 0).cummax(1).values
        if not torch.equal(expected_BS, start_BS.long()) or not begins_BS[:, :1].all():
            raise ValueError("start_BS: expected, for each token, the position at which its document begins")
        bounds_D = torch.cat((begins_BS.flatten().nonzero().flatten(), torch.tensor([start_BS.numel()])))
        start_BS, on_device_D = (
            tensor.to(torch.int32).contiguous().to(device, non_blocking=True)
            for tensor in (start_BS, bounds_D)
        )
        return cls(start_BS, tuple(bounds_D.tolist()), on_device_D)

    @classmethod
    def of_lengths(
        cls, lengths_B: Tensor, size: int, device: torch.device | str = "cpu"
    ) -> "Documents | None":
        """Return the documents of sequences that end in padding; None if no sequence has any.

        The padding of a sequence is a document of its own, so that nothing sees it. lengths_B: integers on
        the CPU, the tokens of each sequence before its padding, at least 1. size: tokens with padding.
        """
        if bool((lengths_B == size).all()):
            return None
        end_B1 = lengths_B[:, None]
        return cls.of(torch.where(torch.arange(size) < end_B1, 0, end_B1), device)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document; 0 without tokens."""
        return max((last - first for first, last in pairwise(self.bounds)), default=0)

    def runs(self, tokens: int = RUN) -> list[list["Run"]]:
        """Return each sequence cut into runs: one document, or several of at most `tokens` together."""
        size = self.start_BS.shape[1]
        found: list[list[Run]] = [[] for _ in self.start_BS]
        for first, last in pairwise(self.bounds):
            runs = found[first // size]
            if runs and runs[-1].length + last - first <= tokens:
                runs[-1] = Run(runs[-1].length + last - first, is_one=False)
            else:
                runs.append(Run(last - first, is_one=True))
        return found

    def visible(self, sequences: slice, first: int, length: int, causal: bool = True) -> Tensor:
        """Return what positions first .. first + length - 1 see of each other, on the documents' device.

        bool [B of the slice, 1, length, length]. Without `causal` they see all of their document.
        """
        start_BL = self.start_BS[sequences, first : first + length]
        if not causal:
            return (start_BL[..., None] == start_BL[:, None, :])[:, None]
        place_L = torch.arange(first, first + length, device=start_BL.device)
        return ((place_L >= start_BL[..., None]) & (place_L <= place_L[:, None]))[:, None]


class SourceLengths(NamedTuple):
    """The sequences that cross attention sees, which may end in padding.

    visible_B11L: bool, whether each of the L positions is a token. A tuple, as `Documents` is.
    """

    visible_B11L: Tensor

    @classmethod
    def of(cls, lengths_B: Tensor, size: int, device: torch.device | str = "cpu") -> "SourceLengths | None":
        """Return them for lengths as in `Documents.of_lengths`; None if no sequence has padding."""
        if bool((lengths_B == size).all()):
            return None
        visible_BL = torch.arange(size) < lengths_B[:, None]
        return cls(visible_BL[:, None, None].to(device, non_blocking=True))


class Run(NamedTuple):
    """Neighbouring documents of a sequence. length: in tokens. is_one: whether it is one document."""

    length: int
    is_one: bool
