"""Types of the configuration's values: numbers with their bounds, and paths."""

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema

from megamoe.config.paths import SHORTEST_MINUTES, is_minutes, is_path

# Upper bounds are far above any real use: larger values are mistakes that would overflow or be lost.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(gt=0, le=10**6)]  # a vector's length or a number of things
SizeOrZero = Annotated[int, Field(ge=0, le=10**6)]
Layers = Annotated[int, Field(gt=0, le=2000)]
Length = Annotated[int, Field(gt=0, le=2**24)]  # tokens of a sequence
Small = Annotated[float, Field(ge=1e-30, le=1)]  # added to a divisor; fp32 would lose a smaller value
Deviation = Annotated[float, Field(gt=0, le=1000)]
Decay = Annotated[float, Field(ge=0, le=1000)]
Rate = Annotated[float, Field(gt=0, le=1000)]
Minutes = Annotated[float, Field(ge=0.01, le=10**7)]
_MINUTES_OR_ZERO = {"anyOf": [{"const": 0}, {"type": "number", "minimum": SHORTEST_MINUTES}]}
MinutesOrZero = Annotated[float, AfterValidator(is_minutes), WithJsonSchema(_MINUTES_OR_ZERO)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # NumPy's bound
PathText = Annotated[str, AfterValidator(is_path)]
