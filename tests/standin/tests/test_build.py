"""What a second build of the stand-in makes again."""

import build_standin
import project
import pytest

pytestmark = pytest.mark.any_torch


@pytest.mark.parametrize("colon", [":", " :"], ids=["g++", "nvcc"])
def test_object_is_old_if_a_file_that_it_was_compiled_from_is_gone(tmp_path, colon):
    """As in a build folder that was moved with its objects."""
    header, target = tmp_path / "kernel.h", tmp_path / "kernel.o"
    header.touch()
    target.with_suffix(".d").write_text(f"{target}{colon} {header} \\\n")
    target.touch()
    assert build_standin.dependencies(target) == [header]
    header.unlink()
    assert not build_standin.is_newer(target, build_standin.dependencies(target))


def test_bytecode_of_the_package_stays(tmp_path):
    """Python writes it beside the links when a first program imports the package."""
    made, operators = build_standin.Build(tmp_path), tmp_path / "operators.so"
    made.package(operators)
    bytecode = tmp_path / "packages" / project.PACKAGE / "__pycache__"
    bytecode.mkdir()
    made.package(operators)
    assert bytecode.is_dir()
