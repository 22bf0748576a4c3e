"""Numbers of a schema that llguidance preserves, and replacements for bounds that it does not.

llguidance reads numbers as doubles, writes a constant as the shortest decimal that reads back as the same double, and
counts integers in 64 bits. A number is *representable* if none of that changes it.
"""

import math
from collections.abc import Callable, Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from fractions import Fraction

from services.engine.guided.schemas.schema_nodes import (
    DecimalLiteral,
    InvalidSchema,
    SchemaNode,
    UnsupportedSchema,
    shown,
)

_EXACT = 2**53  # every integer below it is a double
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MAX_INTEGER = 9_223_372 * 10**12  # representable, and within 64 bits
# Beyond it, a range without an opposite bound does not compile.
_MAX_OPEN_BOUND = 10**18
_MAX_MULTIPLE = 2**32 - 1
_MAX_DECIMALS = 20
_STEP_DECIMALS = 12  # more than most outputs have
_SAFE_DIGITS = 15  # with more, llguidance may read a neighbour of the nearest double


class Unrepresentable(Exception):
    """No representable number can replace this one; the message is the reason, to be put after the number."""


def is_representable(number: float) -> bool:
    """Return True if llguidance reproduces a constant as the same number."""
    exact = _exact(number)
    return exact is not None and abs(exact) <= _MAX_INTEGER and _round_trips(exact)


def tighten_bound(bound: float, *, upwards: bool, exclusive: bool) -> float:
    """Return the next representable bound that admits only numbers that `bound` admits. Raises Unrepresentable."""
    exact = Fraction(10**400 if bound > 0 else -(10**400)) if math.isinf(bound) else _exact(bound)
    if exact is None:
        raise Unrepresentable("which is too close to 0 for a double")
    sign = 1 if upwards else -1
    if exact * sign >= _MAX_OPEN_BOUND:
        raise Unrepresentable("which leaves only numbers beyond 1e18; those are not compared exactly")
    if exact * sign < -_MAX_INTEGER:
        return -_MAX_INTEGER * sign
    if abs(exact) < _EXACT:
        return bound if _round_trips(exact) else _next_representable(exact, upwards)
    # Beyond it, the neighbours of doubles are not doubles: an exclusive bound might admit itself.
    whole = (math.ceil if upwards else math.floor)(exact) + sign * exclusive
    if _round_trips(nearest := Fraction(_next_double(Fraction(whole), upwards))):
        return int(nearest)
    for digits in range(15, 0, -1):
        unit = 10 ** max(0, len(str(abs(whole))) - digits)
        rounded = -(-whole // unit) * unit if upwards else whole // unit * unit
        if _round_trips(Fraction(rounded)):
            return int(rounded)
    raise Unrepresentable("which a double cannot represent")


def move_bounds(node: SchemaNode, path: str) -> None:
    """Move bounds that are not exact as a double inwards, to the next double. Raises InvalidSchema.

    Draft 4's `exclusiveMinimum: true`, which is about the bound next to it, becomes a bound itself.
    """
    for included, excluded in (LOWER, UPPER):
        if isinstance(node.get(excluded), bool) and node.pop(excluded) and included in node:
            node[excluded] = node.pop(included)
    for keywords, upwards in ((LOWER, True), (UPPER, False)):
        for keyword in keywords:
            bound = node.get(keyword)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            try:
                node[keyword] = tighten_bound(bound, upwards=upwards, exclusive=keyword.startswith("exclusive"))
            except Unrepresentable as error:
                raise UnsupportedSchema(f"{path}/{keyword} is {shown(bound)}, {error}") from error
    least, most = _tightest(node, LOWER, max), _tightest(node, UPPER, min)
    if least > most:
        raise InvalidSchema(f"{path}: no double lies between its bounds")


def include_bounds(bounded: list[tuple[SchemaNode, str]], *, together: bool) -> None:
    """Replace excluded bounds that llguidance would admit by included ones inside them. Raises InvalidSchema.

    If schemas intersect, any bound may meet any other: `together`.
    """
    nodes = [node for node, _ in bounded]
    meeting = [_bounds(nodes, keywords) for keywords in (LOWER, UPPER)]
    for node, path in bounded:
        lower, upper = meeting if together else [_bounds([node], keywords) for keywords in (LOWER, UPPER)]
        _include(node, path, LOWER, upper)
        _include(node, path, UPPER, lower)


def _include(node: SchemaNode, path: str, keywords: tuple[str, str], opposites: list[float]) -> None:
    (included, excluded), upwards = keywords, keywords is LOWER
    for bound in _bounds([node], (excluded,)):
        near = [one for one in opposites if admits_excluded_bound(bound, one, upwards=upwards)]
        if not near:
            continue
        try:
            moved = inner_bound(bound, min(near, key=lambda one: abs(one - bound)))
        except Unrepresentable as error:
            raise UnsupportedSchema(f"{path}/{excluded} is {shown(bound)}, {error}") from error
        del node[excluded]
        node[included] = (max if upwards else min)([moved, *_bounds([node], (included,))])


def _bounds(nodes: list[SchemaNode], keywords: tuple[str, ...]) -> list[float]:
    bounds = [node.get(one) for node in nodes for one in keywords]
    return [bound for bound in bounds if isinstance(bound, int | float) and not isinstance(bound, bool)]


def _tightest(node: SchemaNode, keywords: tuple[str, str], choose: Callable[..., float]) -> float:
    return choose(_bounds([node], keywords), default=-math.inf if choose is max else math.inf)


def admits_excluded_bound(bound: float, opposite: float, *, upwards: bool) -> bool:
    """Return True if llguidance admits the excluded `bound` when the range reaches `opposite`.

    llguidance makes the decimals optional if both bounds have the same integer part, and the one nearer to 0 has no
    decimals.
    """
    outwards = bound >= 0 if upwards else bound <= 0
    return outwards and bound == math.trunc(bound) and 0 < abs(opposite - bound) < 1 and (opposite > bound) == upwards


def inner_bound(bound: float, opposite: float) -> float:
    """Return an included bound between an excluded integer bound and the opposite one. Raises Unrepresentable."""
    if bound:
        whole = int(bound)
        decimals = min(_STEP_DECIMALS, _SAFE_DIGITS - len(str(abs(whole))))
        room = abs(Fraction(repr(opposite)) - whole)
        if decimals > 0 and (step := Fraction(1, 10**decimals)) <= room:
            return float(whole + step if opposite > bound else whole - step)
    # The numbers next to 0 have hundreds of digits.
    elif inside := math.copysign(min(10.0**-_STEP_DECIMALS, abs(opposite) / 10), opposite):
        return inside
    raise Unrepresentable("which is too close to the opposite bound")


def exact_multiple(number: object) -> Fraction:
    """Return the value of a multipleOf if llguidance reads it as the same decimal. Raises Unrepresentable."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise Unrepresentable("it must be greater than 0")
    coefficient, decimals = float(number), 0
    while coefficient % 1 and decimals < _MAX_DECIMALS:
        coefficient *= 10
        decimals += 1
    made = Fraction(int(coefficient), 10**decimals)
    if coefficient > _MAX_MULTIPLE or made != _exact(number):
        raise Unrepresentable("which has too many digits")
    return made


def lcm_overflows(multiples: Iterable[Fraction]) -> bool:
    """Return True if the least common multiple may overflow llguidance's 32 bits."""
    different = list(dict.fromkeys(multiples))
    scale = math.lcm(*(_power_of_ten(one.denominator) for one in different))
    total = 1
    for number, one in enumerate(different):
        scaled = int(one * scale)
        if scaled > _MAX_MULTIPLE or (number and total * scaled > _MAX_MULTIPLE):
            return len(different) > 1
        total = math.lcm(total, scaled)
    return False


def _power_of_ten(denominator: int) -> int:
    power = 1
    while power % denominator:
        power *= 10
    return power


def _exact(number: float) -> Fraction | None:
    """Return the exact value; None if it is too large or too small for a double."""
    if not isinstance(number, DecimalLiteral):
        return Fraction(number)
    try:
        written = Decimal(number.text)
    except InvalidOperation:
        return None
    if math.isinf(number) or bool(number) != bool(written):
        return None
    return Fraction(written)


def _round_trips(exact: Fraction) -> bool:
    try:
        double = float(exact)
    except OverflowError:
        return False
    if exact.denominator == 1:
        return Fraction(repr(double)) == exact == Fraction(double)
    # If the digits exceed 2^53, llguidance may read a neighbour of the nearest double.
    digits = int("".join(map(str, Decimal(repr(double)).as_tuple().digits)))
    return Fraction(repr(double)) == exact and digits <= _EXACT


def _next_double(exact: Fraction, upwards: bool) -> float:
    double = float(exact)
    outside = double < exact if upwards else double > exact
    return math.nextafter(double, math.inf if upwards else -math.inf) if outside else double


def _next_representable(exact: Fraction, upwards: bool) -> float:
    rounding = Context(prec=_SAFE_DIGITS, rounding=ROUND_CEILING if upwards else ROUND_FLOOR)
    return float(rounding.divide(Decimal(exact.numerator), Decimal(exact.denominator)))
