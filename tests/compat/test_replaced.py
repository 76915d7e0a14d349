"""Attributes of modules and classes are replaced for a while, and are as before afterwards."""

import pytest

from megamoe.compat import replaced


class Owner:
    @classmethod
    def name(cls) -> str:
        return cls.__name__


def test_attributes_are_as_before_after_an_error() -> None:
    before = dict(vars(Owner))
    with pytest.raises(ZeroDivisionError), replaced(Owner, name=lambda: "replaced"):
        assert Owner.name() == "replaced"
        raise ZeroDivisionError
    assert dict(vars(Owner)) == before
    owner = Owner()
    with replaced(owner, name=1, missing=2):
        assert (owner.name, owner.missing) == (1, 2)  # type: ignore[attr-defined]
    assert vars(owner) == {} and owner.name() == "Owner"
