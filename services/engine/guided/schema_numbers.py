"""Which numbers of a schema llguidance keeps as they are, and what to put in the place of others.

It reads numbers as doubles, writes a constant as the shortest decimal that reads back as the same double, and counts
integers in 64 bits. A number is *held* where nothing of that changes it.
"""

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from fractions import Fraction

_EXACT = 2**53  # each integer below it is a double
_LARGEST = 9_223_372 * 10**12  # held, and counted in 64 bits
# From here on, a range without end on its far side does not compile.
_LARGEST_FLOOR = 10**18
_LARGEST_MULTIPLE = 2**32 - 1
_MOST_DECIMALS = 20
_STEP_DECIMALS = 12  # more than most answers have
_SAFE_DIGITS = 15  # of more, llguidance may read the neighbour of the nearest double


class NotHeld(Exception):
    """A number that nothing can take the place of; the message says why, after the number."""


class Written(float):
    """A number with a fraction or an exponent, and how it was written."""

    text: str

    def __new__(cls, text: str) -> "Written":
        """Read a number of JSON."""
        made = super().__new__(cls, text)
        made.text = text
        return made


def is_held(number: float) -> bool:
    """Return whether a constant comes out as the same number."""
    exact = _exact(number)
    return exact is not None and abs(exact) <= _LARGEST and _holds(exact)


def inward(bound: float, *, upwards: bool, exclusive: bool) -> float:
    """Return a bound that is held, and lets only such numbers pass as `bound` does. Raises NotHeld."""
    exact = Fraction(10**400 if bound > 0 else -(10**400)) if math.isinf(bound) else _exact(bound)
    if exact is None:
        raise NotHeld("which is too near to 0 for a double")
    sign = 1 if upwards else -1
    if exact * sign >= _LARGEST_FLOOR:
        raise NotHeld("which leaves only numbers beyond 1e18; those are not compared exactly")
    if exact * sign < -_LARGEST:
        return -_LARGEST * sign
    if abs(exact) < _EXACT:
        return bound if _holds(exact) else _next_held(exact, upwards)
    # From here on neighbours of doubles are not doubles: an exclusive bound might let itself pass.
    whole = (math.ceil if upwards else math.floor)(exact) + sign * exclusive
    if _holds(nearest := Fraction(_next_double(Fraction(whole), upwards))):
        return int(nearest)
    for digits in range(15, 0, -1):
        unit = 10 ** max(0, len(str(abs(whole))) - digits)
        rounded = -(-whole // unit) * unit if upwards else whole // unit * unit
        if _holds(Fraction(rounded)):
            return int(rounded)
    raise NotHeld("which a double does not hold")


def admitted_excluded_bound(bound: float, opposite: float, *, upwards: bool) -> bool:
    """Return whether llguidance admits `bound`, though it is excluded, when numbers have to reach `opposite`.

    It makes the digits after the point optional where both have the same integer part and that of the bound nearer to
    0 has none of them.
    """
    outwards = bound >= 0 if upwards else bound <= 0
    return outwards and bound == math.trunc(bound) and 0 < abs(opposite - bound) < 1 and (opposite > bound) == upwards


def just_inside(bound: float, opposite: float) -> float:
    """Return a number between an excluded whole bound and the opposite one, to be included. Raises NotHeld."""
    if bound:
        whole = int(bound)
        decimals = min(_STEP_DECIMALS, _SAFE_DIGITS - len(str(abs(whole))))
        room = abs(Fraction(repr(opposite)) - whole)
        if decimals > 0 and (step := Fraction(1, 10**decimals)) <= room:
            return float(whole + step if opposite > bound else whole - step)
    # Next to 0 are numbers of hundreds of digits.
    elif inside := math.copysign(min(10.0**-_STEP_DECIMALS, abs(opposite) / 10), opposite):
        return inside
    raise NotHeld("which is too near to the bound on the other side")


def held_multiple(number: object) -> Fraction:
    """Return the value of a multipleOf, where llguidance makes the same decimal of it. Raises NotHeld."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise NotHeld("it must be a number above 0")
    coefficient, decimals = float(number), 0
    while coefficient % 1 and decimals < _MOST_DECIMALS:
        coefficient *= 10
        decimals += 1
    made = Fraction(int(coefficient), 10**decimals)
    if coefficient > _LARGEST_MULTIPLE or made != _exact(number):
        raise NotHeld("which has too many digits")
    return made


def lcm_overflows(multiples: Iterable[Fraction]) -> bool:
    """Return whether llguidance, which multiplies in 32 bits, might get the least common multiple of them wrong."""
    different = list(dict.fromkeys(multiples))
    scale = math.lcm(*(_power_of_ten(one.denominator) for one in different))
    total = 1
    for number, one in enumerate(different):
        scaled = int(one * scale)
        if scaled > _LARGEST_MULTIPLE or (number and total * scaled > _LARGEST_MULTIPLE):
            return len(different) > 1
        total = math.lcm(total, scaled)
    return False


def _power_of_ten(denominator: int) -> int:
    power = 1
    while power % denominator:
        power *= 10
    return power


def _exact(number: float) -> Fraction | None:
    """Return what was written; None where it is too large or too small for a double."""
    if not isinstance(number, Written):
        return Fraction(number)
    try:
        written = Decimal(number.text)
    except InvalidOperation:
        return None
    if math.isinf(number) or bool(number) != bool(written):
        return None
    return Fraction(written)


def _holds(exact: Fraction) -> bool:
    try:
        double = float(exact)
    except OverflowError:
        return False
    if exact.denominator == 1:
        return Fraction(repr(double)) == exact == Fraction(double)
    # Of digits that make more than 2^53, llguidance may read a neighbour of the nearest double.
    digits = int("".join(map(str, Decimal(repr(double)).as_tuple().digits)))
    return Fraction(repr(double)) == exact and digits <= _EXACT


def _next_double(exact: Fraction, upwards: bool) -> float:
    double = float(exact)
    outside = double < exact if upwards else double > exact
    return math.nextafter(double, math.inf if upwards else -math.inf) if outside else double


def _next_held(exact: Fraction, upwards: bool) -> float:
    rounding = Context(prec=_SAFE_DIGITS, rounding=ROUND_CEILING if upwards else ROUND_FLOOR)
    return float(rounding.divide(Decimal(exact.numerator), Decimal(exact.denominator)))
