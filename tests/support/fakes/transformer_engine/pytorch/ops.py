"""Names of which Megatron-Core's annotations speak; nothing builds them."""


class Unused:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise AssertionError("no part of this project builds it")


class Sequential(Unused):
    pass


class FusibleOperation(Unused):
    pass


class RMSNorm(Unused):
    pass
