"""Foreign text for a terminal or a log line: what a terminal would act on is shown instead of done.

Control characters (C0, C1), line separators, and the format characters that reverse or hide text (Unicode UAX #9:
bidirectional controls; zero-width ones), with which one name can be made to look like another.
"""

from __future__ import annotations

import re

_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")


def escaped(text: str) -> str:
    """Such characters as ``\\x1b``, ``\\u202e``: nothing is lost, nothing acts."""
    return _ACTING.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
