"""Documentation to English paragraphs: what is kept of each format, what is left out, and the corpus made of it."""

import gzip

import make_corpus
import prose
import pytest

SENTENCE = "A peer that is slower than the others takes a smaller share of the batch, so that all end at one time."
OTHER = "The second of the two texts is here to see that paragraphs are told apart by what stands in them."
SIGNS = "\\*(C`smaller\\*(C'"  # as pod2man writes them


HTML = f"""<html><head><title>The title of the page is not a part of the text that we want to have.</title>
<style>p {{ the: of; }}</style></head><body><nav><p>{OTHER}</p></nav>
<h1>Shares</h1><p>A peer that is <em>slower</em> than the&nbsp;others takes a <code>smaller</code> share of the
batch, so that all <a href="x.html">end</a> at one time.</p><pre>{OTHER}</pre>
<ul><li>{OTHER}<br></li></ul></body></html>"""

DOCBOOK = f"""<section xml:lang="en"><info><abstract><para>{OTHER}</para></abstract></info><title>Shares</title>
<para>A peer that is <emphasis>slower</emphasis> than the others takes a <varname>smaller</varname> share of the batch,
so that all end at one time.</para><programlisting>{OTHER}</programlisting><index/>
<listitem><para>{OTHER}</para></listitem></section>"""

MAN = f""".\\" a comment about the page that is in the way of the text
.TH PEER 1 "of the" "and the"
.SH DESCRIPTION
A peer that is
.I slower
than the others takes a {SIGNS} share of the batch,
.BR "so that" " all"
end at one time.
.nf
{OTHER}
.fi
.PP
{OTHER}
"""

INFO = f"""File: peer.info,  Node: Top,  Next: Other,  Up: (dir)

{SENTENCE.replace(" share", chr(10) + "share")}

* Menu:

* Other::        The other node of the file that is to be read.

        {OTHER}

   {OTHER}
"""

RST = f"""Shares
======

A peer that is *slower* than the others takes a ``smaller`` share of the batch, so that all :ref:`end <the-end>` at one
time.

::

        {OTHER}

- {OTHER}
- The end.
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.html", HTML), ("a.xml", DOCBOOK), ("a.1", MAN), ("a.info-2", INFO), ("a.rst", RST), ("A.TXT", INFO)],
)
def test_sentences_are_kept_and_the_rest_is_not(name, text):
    assert prose.paragraphs(name, text) == [SENTENCE, OTHER]


def test_a_file_of_another_kind_has_no_prose():
    assert prose.paragraphs("a.png", SENTENCE) == prose.paragraphs("README", SENTENCE) == []


@pytest.mark.parametrize(
    "paragraph",
    [
        "The end.",
        SENTENCE.removesuffix("."),
        "for (i = 0; i < n; i++) { a[i] = b[i] + c[i]; } the of and to in is a that for it as with on be are.",
        "Ein Teilnehmer, der langsamer ist als die anderen, bekommt einen kleineren Anteil an jedem Stapel zugeteilt.",
        "Copyright Alpha Beta Gamma Delta Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi Omicron Pi Rho Sigma Tau.",
    ],
)
def test_what_is_no_english_sentence_is_told_apart(paragraph):
    assert not prose.is_prose(paragraph)
    assert prose.is_prose(SENTENCE)


@pytest.mark.parametrize(
    ("name", "english"),
    [
        ("usr/share/doc/x/index.html", True),
        ("usr/share/doc/x/index.en.html", True),
        ("usr/share/doc/x/en/index.html", True),
        ("usr/share/doc/x/index.fr.html", False),
        ("usr/share/doc/x/pt_br/index.html", False),
        ("usr/share/doc/x/zh-CN/index.html", False),
        ("usr/share/man/de/man1/x.1", False),
        ("usr/share/doc/x/js/index.html", True),
    ],
)
def test_other_languages_are_told_by_their_names(name, english):
    assert make_corpus.is_english(name) == english


def test_licences_come_from_the_copyright_file():
    licences = make_corpus.licences
    assert licences("Files: *\nLicense: GPL-2+\n text\nFiles: b\nLicense: Expat\nLicense: GPL-2+\n") == "Expat, GPL-2+"
    assert licences("see /usr/share/common-licenses/GPL-3.") == "GPL-3"
    assert licences("under the terms of the GNU General Public License, or") == "GNU General Public License"
    assert licences("do what you like") == "see its copyright file"
    assert licences("License:\n\nThe Python License\nLicense: By using it you agree\n") == "Python License"


def test_a_documentation_folder_that_is_a_link_has_the_licence_of_the_other_package(tmp_path, monkeypatch):
    doc = tmp_path / "unpacked/usr/share/doc"
    doc.mkdir(parents=True)
    (doc / "manual").symlink_to("common")
    (tmp_path / "common_1_all.deb").touch()

    def extract(command, check):
        assert command[:2] == ["dpkg-deb", "--extract"] and command[2].endswith("common_1_all.deb")
        (doc / "common").mkdir()
        (doc / "common/copyright").write_text("License: MIT\n")

    monkeypatch.setattr(make_corpus.subprocess, "run", extract)
    assert make_corpus.licences(make_corpus.copyright_of("manual", tmp_path / "unpacked", tmp_path)) == "MIT"


def test_a_corpus_has_each_paragraph_once_and_some_documents_held_out(tmp_path):
    corpus = make_corpus.Corpus(tmp_path / "out")
    for i in range(200):
        corpus.add("package", f"{i}.html", f"<p>{SENTENCE}</p><p>Number {i} of the pages: {OTHER}</p>")
    corpus.add("package", "again.rst", f"*{SENTENCE}*".replace("slower", "``slower``"))
    corpus.close()
    train, held_out = ((tmp_path / "out" / name).read_text() for name in ("train.txt", "heldout.txt"))
    assert (train + held_out).count(SENTENCE) == 1
    assert (train + held_out).count(OTHER) == 200
    assert 0 < held_out.count(OTHER) < 20
    assert corpus.n_bytes == len(train) + len(held_out)


def test_the_documents_of_a_package_are_read_in_order(tmp_path):
    (tmp_path / "b.html").write_text("plain")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("gr\u00fcn".encode()))
    (tmp_path / "c.txt").symlink_to(tmp_path / "b.html")
    (tmp_path / "d.fr.html").write_text("non")
    (tmp_path / "e.info-1.gz").write_bytes(gzip.compress(b"the same as b.html"))
    assert list(make_corpus.documents(tmp_path)) == [("a.txt", "gr\u00fcn"), ("b.html", "plain")]
    for name in ("_sources/b.rst.txt", "html/d.html", "d.rst", "html/d.rst", "changelog.gz", "html/changelog-1.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("plain")
    found = [name for name, _ in make_corpus.documents(tmp_path)]
    assert found == ["a.txt", "b.html", "d.rst", "html/d.html"]
    for name in ("_sources/b.rst.txt", "html/d.html", "d.rst", "html/d.rst"):
        (tmp_path / name).unlink()
    (tmp_path / "b.html").unlink()
    assert [name for name, _ in make_corpus.documents(tmp_path)] == ["a.txt", "e.info-1"]
