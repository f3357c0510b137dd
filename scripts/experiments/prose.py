"""The English paragraphs of documentation in HTML, DocBook, Mallard, manual pages, Info and plain text.

Listings, tables of names, menus and other languages are no prose. They are recognised by their tags where the format
has tags. A paragraph counts as prose if it consists of sentences in which at least every fifth word is one of the most
frequent English words."""

import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


INLINE = _words(
    "a abbr acronym b big cite code del dfn em font i ins kbd mark q s samp small span strong sub sup tt u var "
    "application command emphasis envar filename firstterm function guibutton guilabel guimenu guimenuitem keycap "
    "link literal option package parameter phrase productname prompt quote replaceable systemitem type ulink varname "
    "xref gui app cmd file key sys input output"
)
# The content of these tags is left out.
SILENT = _words(
    "head script style pre nav header footer svg math select button table programlisting screen synopsis indexterm "
    "literallayout bookinfo articleinfo info index toc"
)
COMMON = _words(
    "the of and to in is a that for it as with on be are this by or not an you can if from which will at have has was "
    "but your may when all use used"
)
COMMON_FRAC, LETTER_FRAC = 0.2, 0.88
MIN_CHARACTERS, MIN_WORDS = 60, 10
ENDS = (".", "!", "?", ":", '."', ".)", ".”")


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph consists of English sentences."""
    words = re.findall(r"[a-z']+", paragraph.lower())
    if len(paragraph) < MIN_CHARACTERS or len(words) < MIN_WORDS or not paragraph.endswith(ENDS):
        return False
    letters = sum(character.isalpha() or character in " ,.'" for character in paragraph)
    common = sum(word in COMMON for word in words)
    return letters >= LETTER_FRAC * len(paragraph) and common >= COMMON_FRAC * len(words)


def joined(text: str) -> str:
    """The text in one line with single spaces."""
    return " ".join(text.split())


def from_markup(text: str) -> Iterator[str]:
    """Paragraphs of HTML, DocBook or Mallard."""
    parser = _Markup()
    parser.feed(text)
    parser.close()
    parser.end_paragraph()
    yield from parser.paragraphs


class _Markup(HTMLParser):
    """Collects paragraphs. Every tag that is not inline ends a paragraph; the content of a SILENT tag is dropped."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._words: list[str] = []
        self._silent: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in SILENT:
            self._silent.append(tag)
        if tag == "br":
            self._words.append(" ")
        elif tag not in INLINE:
            self.end_paragraph()

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        if tag not in INLINE:
            self.end_paragraph()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            while self._silent.pop() != tag:
                pass
        if tag not in INLINE:
            self.end_paragraph()

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self._words.append(data)

    def end_paragraph(self) -> None:
        paragraph = joined("".join(self._words)).replace("¶", "")
        self._words.clear()
        if paragraph:
            self.paragraphs.append(paragraph)


def from_plain(text: str) -> Iterator[str]:
    """Paragraphs of plain text, reStructuredText, Markdown or Info. Empty lines separate them; deeply indented ones are
    listings and left out."""
    for block in re.split(r"\n[ \t]*\n|\n(?=[ \t]*[-*+•] )", text.replace("\r\n", "\n")):
        lines = block.strip("\n").split("\n")
        if all(line.startswith(("        ", "\t")) for line in lines):
            continue
        paragraph = joined(re.sub(r"^\s*(?:[-*+•]|\d+[.)])\s+", "", block))
        paragraph = re.sub(r":[a-z:+-]+:`([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", paragraph)  # roles of reStructuredText
        paragraph = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)  # links of Markdown
        yield re.sub(r"``|\*\*|`|(?<!\w)[*_](?=\w)|(?<=\w)[*_](?!\w)", "", paragraph).replace("::", ":")


# Requests of roff that end a paragraph, and requests whose arguments are text. All other requests are dropped.
ROFF_BREAKS = _words(".PP .P .LP .SH .SS .TP .IP .HP .br .sp .RS .RE .Pp .Sh .Ss .It .Bl .El")
ROFF_TEXT = _words(".B .I .BR .RB .IR .RI .BI .IB .SM .SB .Nm .Ar .Fl .Xr .Pa .Dv .Va .Em .Sy .Cm .Ic .Fn")
ROFF_SIGNS = {r"\-": "-", r"\e": "\\", r"\&": "", r"\ ": " ", r"\(aq": "'", r"\(dq": '"', r"\(em": "-", r"\(en": "-"}
ROFF_SIGNS |= {r"\(lq": '"', r"\(rq": '"', r"\(oq": "'", r"\(cq": "'", r"\(bu": "", r"\|": "", r"\^": "", r"\:": ""}
ROFF_SIGNS |= {r"\*(C`": "", r"\*(C'": "", r'\*(L"': '"', r'\*(R"': '"', r"\*(--": "-"}  # from pod2man
ROFF_SIGNS |= {r"\*(Aq": "'", r"\*(C+": "C++", r"\*(lq": '"', r"\*(rq": '"'}


def from_man(text: str) -> Iterator[str]:
    """Paragraphs of a manual page in roff."""
    words: list[str] = []
    listing = False
    for line in text.split("\n"):
        request, _, rest = line.partition(" ")
        if request in (".nf", ".EX", ".Bd", ".fi", ".EE", ".Ed"):
            listing = request in (".nf", ".EX", ".Bd")
        if not line.strip() or request in ROFF_BREAKS:
            yield _roff_text(words)
            words = []
        elif listing:
            continue
        elif request in ROFF_TEXT:
            # Requests with two alternating fonts join their arguments. A space inside quotes stays.
            arguments = re.findall(r'"([^"]*)"|(\S+)', rest)
            words.append(("" if len(request) == 3 and request.isupper() else " ").join(a or b for a, b in arguments))
        elif not line.startswith((".", "'")):
            words.append(line)
    yield _roff_text(words)


def _roff_text(words: list[str]) -> str:
    text = re.sub(r"\\f(?:\[\w*\]|\(..|.)", "", " ".join(words))
    text = re.sub(r"\\s[+-]?\d", "", text)
    for sign, plain in ROFF_SIGNS.items():
        text = text.replace(sign, plain)
    text = re.sub(r"\\\[([^\]]*)\]", lambda match: _named_sign(match[1]), text)
    return joined(text)


def _named_sign(name: str) -> str:
    return ROFF_SIGNS.get(f"\\({name}", html.unescape(f"&{name};") if name.isalpha() else "")


READERS = {
    "html": from_markup,
    "htm": from_markup,
    "xhtml": from_markup,
    "xml": from_markup,
    "docbook": from_markup,
    "page": from_markup,
    "txt": from_plain,
    "rst": from_plain,
    "md": from_plain,
    "info": from_plain,
} | {section: from_man for section in "12345678"}


def paragraphs(name: str, text: str) -> list[str]:
    """The prose of a file with a known suffix, which may be numbered (.info-2). Other files have none."""
    reader = READERS.get(name.lower().rsplit(".", 1)[-1].partition("-")[0])
    return [paragraph for paragraph in reader(text) if is_prose(paragraph)] if reader else []
