"""A grammar of patches to files in Lark, and texts that it allows and does not allow."""

LARK = r"""
start: begin change+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

change: added | removed | updated
added: "*** Add File: " name LF ("+" /(.*)/ LF)+
removed: "*** Delete File: " name LF
updated: "*** Update File: " name LF moved? (context | line)*
name: /(.+)/
moved: "*** Move to: " name LF
context: ("@@" | "@@ " /(.+)/) LF  // where the change is
line: ("+" | "-" | " ") /(.*)/ LF -> line

%import common.LF
"""

GOOD = (
    "*** Begin Patch\n*** Delete File: a\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a\n*** End Patch\n",
    '*** Begin Patch\n*** Add File: b\\c "d".txt\n+<p>\t"é\\n"</p>\n+\n+\\\n*** End Patch',
    "*** Begin Patch\n*** Update File: x\n*** Move to: y\n@@\n-a\n+b\x01\n </parameter>\n@@ z\n*** End Patch",
)
BAD = (
    "",
    "*** Begin Patch\n*** End Patch",
    "*** Begin Patch\n*** Delete File: \n*** End Patch",
    "*** Begin Patch\n*** Add File: a\n+x\ny\n*** End Patch",
    GOOD[0] + "\n\n",
    GOOD[0].replace("\n", "\\n"),
)
