from __future__ import annotations

import xml.etree.ElementTree as ET

from bench.flame import stacks, svg, tree

PRINTED = """\
gradlane-io
\tffffffff81000002 _copy_to_iter
\tffffffff81000001 do_syscall_64
\t    7f0000000001 gradlane::Connection::Read(gradlane::Connection::Owner&, unsigned long)
\t    7f0000000000 [unknown]

gradlane-io
\t    7f0000000002 gradlane::(anonymous namespace)::ReduceLoop<float>(void*)
\t    7f0000000001 gradlane::Connection::Read(gradlane::Connection::Owner&, unsigned long)
"""


def test_samples_are_added_up_by_path() -> None:
    root = tree(stacks(PRINTED.splitlines()))
    assert root.samples == 2
    read = root.calls["Connection::Read"]
    assert (read.kind, read.samples) == ("gradlane", 2)
    assert {name: (box.kind, box.samples) for name, box in read.calls.items()} == {
        "do_syscall_64": ("kernel", 1),
        "ReduceLoop": ("gradlane", 1),
    }


def test_the_picture_is_xml_and_says_what_share_each_function_has() -> None:
    picture = ET.fromstring(svg("a < b", tree(stacks(PRINTED.splitlines()))))
    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["Connection::Read: 100.0%", "ReduceLoop: 50.0%", "do_syscall_64: 50.0%", "_copy_to_iter: 50.0%"]
