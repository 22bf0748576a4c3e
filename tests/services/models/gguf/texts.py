# ruff: noqa: RUF001
"""500 texts of numbers, whitespace, scripts, emoji and code: the same ones on every machine."""

from random import Random

_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    " \n",
    "\n ",
    " \t ",
    "        ",
    "\u00a0",
    "\u3000",
)
_WORDS = (
    *[
        "the",
        "The",
        "THE",
        "can't",
        "I'LL",
        "we've",
        "it's",
        "o'clock",
        "don'T",
        "naïve",
        "café",
        "Straße",
        "JSON",
        "iPhone",
        "HTTPServer",
        "aB",
        "Abc",
        "ABC",
        "x",
    ],
    *["a", "I", "we're", "you'd", "He'S", "x1", "3rd", "GPT-4o", "v2.0.1", "ſt", "it'ſ", "e-mail", "semi;colon"],
)
_SCRIPTS = (
    *(
        "Привет, мир!",
        "Ελληνικά γράμματα",
        "中文字符和標點,。、",
        "日本語のテキスト、カタカナ",
        "한국어 문장입니다.",
        "ㄅㄆㄇ ㄱㄴㄷ",
    ),
    *("العربية 123 والأرقام ٠١٢٣", "עברית עם ניקוד שָׁלוֹם", "हिन्दी में वाक्य", "ภาษาไทยไม่มีวรรค", "বাংলা ভাষা", "தமிழ்", "తెలుగు"),
    *(
        "ქართული ენა",
        "Հայերեն լեզու",
        "አማርኛ",
        "ខ្មែរ",
        "မြန်မာ",
        "ລາວ",
        "Tiếng Việt có dấu",
        "Žluťoučký kůň",
        "İstanbul ıĞ",
    ),
    *(
        "cafe\u0301 e\u0301e\u0301",
        "n\u0303o\u0308",
        "Ǆ ǅ ǆ ﬁ ﬀ",
        "Ꭰ ꭰ ᲐᲑ ა",
        "𝐀𝒷 𝟘𝟙 𐐀𐐨",
        "ｆｕｌｌ　ｗｉｄｔｈ１２３",
        "Ａ！Ｂ？",
        "‘quotes’ “and” „more“",
        "¿Qué? ¡Sí!",
    ),
    *(
        "½ ⅓ x² ⁵ Ⅳ ①②",
        "٣٤٥٦ ۱۲۳۴ १२३४",
        "a\u200bb\u200cc\u200dd",
        "\ufeffbom",
        "soft\u00adhyphen",
        "\ue000\ue001",
        "…—–‒",
    ),
)
_EMOJI = ("😀", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "❤️", "1️⃣", "☃", "🤷🏿‍♂️", "✨✨✨", "🏴󠁧󠁢󠁥󠁮󠁧󠁿")
_CODE = (
    *(
        "def f(x):\n    return x ** 2\n",
        "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}\n",
        "x = {'a': [1, 2], \"b\": None}",
    ),
    *(
        '<div class="a">\n  <p>Hi</p>\n</div>',
        "SELECT * FROM t WHERE id>=42;",
        "#!/bin/bash\nset -euo pipefail\n",
        "a->b::c(&d)&&!e||f",
    ),
    *(
        "https://example.com/a?b=c&d=%20#e",
        'git commit -m "fix: x"\r\n',
        "\\frac{a}{b} $x_1^2$",
        "```python\nprint('hi')\n```",
        "/* c */ // d",
    ),
    *(
        "if(a==b){c();}else{d();}",
        "0x1F 1e-9 3.14f 1_000_000",
        "$foo = @bar[~1];",
        "λx.x+1",
        "a\tb\tc\n1\t2\t3",
        "<|notatoken|> <sentinel:12>",
    ),
    *("IMGIMGABZ <|im_start|>user\nhi<|im_end|>\n", "@decorator\nclass A(B): pass", "`tick` ~tilde~ ^caret^ |pipe|"),
)
_MARKS = tuple("!?.,;:-_/\\'\"()[]{}<>@#$%^&*+=~`|")


def texts() -> list[str]:
    """Return the texts, the shortest ones first: single cases, then random mixtures of them."""
    random = Random(20261127)
    found = dict.fromkeys((*_fixed(), *_SCRIPTS, *_EMOJI, *_CODE))
    makers = (_numbers, _blank, _mixture, _code, _scripts)
    while len(found) < 500:
        found[makers[len(found) % len(makers)](random)] = None
    return list(found)


def _fixed() -> tuple[str, ...]:
    """Return cases that reports of users named, and the edges of each kind of piece."""
    return (
        *(
            "a  1",
            "Steps:\n\n1. Mix",
            "x\t\t7",
            "\n\n\n12",
            "1  2",
            "a",
            " ",
            "  ",
            "\n",
            "\t",
            " a",
            "a ",
            "  a  ",
            "0",
        ),
        *(str(10**size + 7) for size in range(1, 14)),
        *(" " * size + "x" for size in range(2, 40, 5)),
        *("\n" * size for size in (2, 3, 4, 7, 16, 30, 33)),
        *(
            "a\n" * 3,
            " \n \n x",
            "x \n\n\t y",
            "\r\n\r\n",
            "\u0085x\u2028y",
            "\x00\x01\x1fa\x7f",
            "a\x0b\x0cb",
            "\ufffd",
            "▁a▁▁b ▁",
        ),
        *(
            "I'm I'M we'LL 'tis 's'",
            "12345678901234567890",
            "1,234,567.89",
            "2026-11-27T12:00:00Z",
            "+49 (0)30 1234-567",
            "x1y22z333w4444",
        ),
        *(
            "abc123def4567ghi",
            "3.14159e-10",
            "²1234²567",
            "1½2⅓34",
            "12٣٤56",
            "a1b",
            "№5 §12 10€ $9.99 5%",
            "   3",
            "-  -3",
        ),
    )


def _numbers(random: Random) -> str:
    parts = []
    for _ in range(random.randrange(1, 7)):
        number = str(random.randrange(10 ** random.randrange(1, 12)))
        parts.append(
            random.choice(("", "-", "$", "x", "#", "v", "("))
            + number
            + random.choice(("", "%", ")", ".5", "th", ",000", "e3"))
        )
        parts.append(random.choice((*_SPACES, *_MARKS, "")))
    return "".join(parts)


def _blank(random: Random) -> str:
    return "".join(
        random.choice(_SPACES if random.random() < 0.7 else (*_WORDS, *_MARKS, "7", "42"))
        for _ in range(random.randrange(3, 14))
    )


def _mixture(random: Random) -> str:
    pools = (_SPACES, _WORDS, _SCRIPTS, _EMOJI, _CODE, _MARKS, tuple("0123456789"))
    return "".join(random.choice(random.choice(pools)) for _ in range(random.randrange(2, 12)))


def _code(random: Random) -> str:
    lines = []
    for _ in range(random.randrange(1, 6)):
        indent = random.choice(("", "  ", "    ", "\t", "\t\t", "        "))
        lines.append(indent + random.choice(_CODE) + random.choice((" ", "", ";", "  # ")) + random.choice(_WORDS))
    return random.choice(("\n", "\r\n", "\n\n")).join(lines)


def _scripts(random: Random) -> str:
    return random.choice((" ", "", "\n", ", ")).join(
        random.choice((*_SCRIPTS, *_WORDS)) for _ in range(random.randrange(2, 7))
    )
