"""Prompts for the bundled pair, written for it: beginnings of the four kinds of text that it was trained on."""

from __future__ import annotations

_CODE = [
    '''\
def read_lines(path, encoding="utf-8"):
    """Return the lines of the file at path without their line ends.

    If the file does not exist, an empty list is returned.
    """
    try:
        with open(path, encoding=encoding) as f:
''',
    '''\
class Counter:
    """Count how often each key was seen."""

    def __init__(self, items=None):
        self._counts = {}
        if items is not None:
            for item in items:
                self.add(item)

    def add(self, item):
''',
    '''\
    def setdefault(self, key, default=None):
        """Return the value for key, and store the default if it is missing."""
        if key in self:
            return self[key]
        self[key] = default
        return default

    def pop(self, key, default=None):
''',
    '''\
def parse_address(text):
    """Split an address of the form host:port into a tuple (host, port).

    Raise ValueError if the port is not a number.
    """
    host, sep, port = text.rpartition(":")
    if not sep:
        raise ValueError(
''',
    '''\
import os
import sys

def find_module(name, path=None):
    """Look for a module in the directories on the path."""
    if path is None:
        path = sys.path
    for entry in path:
        filename = os.path.join(entry, name + ".py")
        if
''',
]

_DOCS = [
    """\
:mod:`ledger` --- Keeping accounts in a file
============================================

.. module:: ledger
   :synopsis: Read and write simple account files.

**Source code:** :source:`Lib/ledger.py`

--------------

This module provides
""",
    """\
.. function:: open_archive(path, mode='r', *, password=None)

   Open the archive at *path* and return an :class:`Archive` object. If *mode* is
   ``'w'``, the file is created, and an existing file is overwritten. The argument
   *password*
""",
    """\
.. class:: Timer(interval, function, args=None)

   Call *function* again and again, each time after *interval* seconds have passed.

   .. method:: start()

      Start the timer. This method raises :exc:`RuntimeError` if
""",
    """\
Reading a file line by line
---------------------------

To read a text file, open it with the built-in function :func:`open` and iterate over
the file object. For example::

   >>> with open('notes.txt') as f:
   ...     for line in f:
""",
]

_JSON = [
    """\
{
  "module": "archive.py",
  "class": "ArchiveReader",
  "line": 48,
  "summary": "Read the members of an archive one after another.",
  "methods": [
    {
      "name": "__init__",
      "line": 52,
      "arguments": [
""",
    """\
{
  "statuses": [
    {
      "code": 230,
      "name": "KETTLE_FULL",
      "phrase": "Kettle Full",
      "description": "The kettle is full and may be heated"
    },
    {
      "code":
""",
    """\
{
  "module": "garden/plants.py",
  "class": "Tree",
  "line": 7,
  "summary": "A plant with a trunk.",
  "methods": [
    {
      "name": "__repr__",
      "line": 11,
      "arguments": [
""",
    """\
{
  "entities": [
    {
      "name": "boat",
      "codepoint": 9973,
      "hex": "0x26f5"
    },
    {
      "name": "tent",
      "codepoint": 9978,
      "hex":
""",
]

_PROSE = [
    """\
It had rained upon the whole of that week, and Miss Harcourt, who could not walk out, and would not
read, had nothing left to do but to be angry with her cousin. "I am sure," said she, "that
""",
    """\
Mr. Aldous was a widower of large fortune and small conversation, who had been persuaded by his sister
to take the house at Thornbury for the summer; and before he had been in it a fortnight, every family in the
""",
    """\
"You are very good, sir," replied Eleanor, with more composure than she felt, "but I have made up
my mind to stay with my mother until the spring; and I do not think that any thing
""",
    """\
The letter was read a second time, and with a very different feeling. She could not deny that he had been
generous; but to be obliged to such a man, and to know that all the neighbourhood would
""",
]

DEMO_PROMPTS: dict[str, list[str]] = {
    workload: [prompt.rstrip("\n") for prompt in prompts]
    for workload, prompts in {"code": _CODE, "docs": _DOCS, "json": _JSON, "prose": _PROSE}.items()
}
"""Workload to prompts of 40 to 70 tokens each; none of them was seen in training."""
