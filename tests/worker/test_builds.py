"""worker.builds: each content of a CUDA C++ extension is built in a folder of its own, once. torch's compilation is
stood in for: a list of what it was asked to compile."""

import forks_with_torch
from conftest import BUNDLE

HEAD = f"""if True:
    import os, sys
    from pathlib import Path
    sys.path.insert(0, {str(BUNDLE / "tools")!r})
    from torch.utils import cpp_extension
    from kernelopt.worker import builds
    compiled = []
    def compile(name, sources, build_directory, **options):
        compiled.append([name, build_directory, Path(sources[-1]).read_text()])
    cpp_extension._write_ninja_file_and_build_library = compile
    cpp_extension._import_module_from_library = lambda name, folder, _: [name, folder]
    builds.keep_apart()
    builds.keep_apart()  # of the second kernel
    def build(text, **options):
        return cpp_extension.load_inline("ext", text, **options)
"""


def answer(tmp_path, code: str, **environment: str):
    """What the code puts into `answer`."""
    return forks_with_torch.answer(HEAD + code, TORCH_EXTENSIONS_DIR=str(tmp_path), **environment)


def test_two_contents_of_one_name_have_folders_of_their_own(tmp_path):
    found = answer(tmp_path, "    answer = [build('int a;'), build('int b;'), build('int a;'), compiled]")
    *modules, compiled = found
    assert {name for name, _ in modules} == {"ext"}  # torch alone would call the second one ext_v1
    folders = [folder for _, folder in modules]
    assert folders[0] == folders[2] != folders[1]
    assert [text.splitlines()[-1] for _, _, text in compiled[:2]] == ["int a;", "int b;"]
    again = answer(tmp_path, "    answer = build('int b;')")
    assert again == modules[1]  # another process finds the build there


def test_what_else_a_build_depends_on_decides_too(tmp_path):
    (tmp_path / "one.cpp").write_text("int a;")
    code = f"""
    file = {str(tmp_path / "one.cpp")!r}
    def load():
        return cpp_extension.load("ext", file)
    answer = [build("int a;"), build("int a;", extra_cflags=["-O1"]), build("int a;", verbose=False), load()]
    Path(file).write_text("int b;")
    answer.append(load())
    """
    plain, optimised, quiet, before, after = answer(tmp_path / "root", code)
    assert plain == quiet and len({folder for _, folder in (plain, optimised, before, after)}) == 4


def test_a_folder_that_the_file_names_and_a_wrong_call_are_torchs_own(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    code = f"""
    answer = [build("int a;", build_directory={str(own)!r})]
    try:
        cpp_extension.load_inline("ext", "int a;", no_such_option=1)
    except TypeError as error:
        answer.append(str(error))
    """
    (_, folder), refused = answer(tmp_path / "root", code)
    assert folder == str(own) and "no_such_option" in refused


def test_the_lock_of_a_process_that_was_killed_holds_nobody_up(tmp_path):
    _, folder = answer(tmp_path, "    answer = build('int a;')")
    code = f"""
    Path({folder!r}, "lock").touch()
    answer = [build("int a;"), compiled]
    """
    (_, again), compiled = answer(tmp_path, code)
    assert again == folder and len(compiled) == 1


def test_a_build_that_failed_is_tried_again(tmp_path):
    code = """
    works, errors = cpp_extension._write_ninja_file_and_build_library, []
    def fails(**options):
        raise RuntimeError("no compiler")
    cpp_extension._write_ninja_file_and_build_library = fails
    for _ in range(2):
        try:
            build("int a;")
        except RuntimeError as error:
            errors.append(str(error))
    cpp_extension._write_ninja_file_and_build_library = works
    name, _ = build("int a;")
    answer = [errors, name, compiled]
    """
    errors, name, compiled = answer(tmp_path, code)
    assert errors == ["no compiler"] * 2 and name == "ext" and len(compiled) == 1


def test_what_the_compiler_printed_stays_with_the_build(tmp_path):
    """A later process compiles nothing; ninja then prints that alone."""
    (tmp_path / "kernel.py").write_text("cpp_extension")
    code = f"""
    from kernelopt.worker import compiler_errors
    compiler_errors.watch(Path({str(tmp_path / "kernel.py")!r}))
    def compile_aloud(name, sources, build_directory, **options):
        old = Path(build_directory, "built")
        os.write(1, b"ninja: no work to do." if old.exists() else b"ptxas says: slow")
        old.touch()
    cpp_extension._write_ninja_file_and_build_library = compile_aloud
    folders = [build(text)[1] for text in ("int a;", "int b;")]
    answer = builds.printed_of([f"{{folders[0]}}/ext.so", f"{{folders[0]}}/other.so", "/none/ext.so"])
    """
    for _ in range(2):
        assert answer(tmp_path / "root", code) == "ptxas says: slow"


LARGE = """
    compile_small = cpp_extension._write_ninja_file_and_build_library
    def compile_large(name, sources, build_directory, **options):
        compile_small(name, sources, build_directory)
        Path(build_directory, "deep").mkdir(exist_ok=True)
        Path(build_directory, "deep", "ext.so").write_bytes(bytes(10_000))
    cpp_extension._write_ninja_file_and_build_library = compile_large
    builds.MOST_BYTES = 25_000
    def kept():
        return sorted(path.read_text().splitlines()[-1] for path in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/main.cpp"))
"""


def test_the_builds_that_were_used_last_are_kept(tmp_path):
    for text in ("int a;", "int b;", "int a;"):
        answer(tmp_path, f"{LARGE}\n    build({text!r}); answer = kept()")
    assert answer(tmp_path, f"{LARGE}\n    build('int c;'); answer = kept()") == ["int a;", "int c;"]
    assert len([*tmp_path.iterdir()]) == 2


def test_no_build_is_removed_that_a_process_uses_or_waits_for(tmp_path):
    assert answer(tmp_path, f"{LARGE}\n    for text in 'abcd': build(f'int {{text}};')\n    answer = kept()") == [
        f"int {text};" for text in "abcd"
    ]
    code = f"""
    import threading, time
    {LARGE.strip()}
    _, folder = build("int w;")
    turns = builds.turn_in(Path(folder))
    turns.__enter__()
    waiting = threading.Thread(target=lambda: build("int w;"), daemon=True)
    waiting.start()
    time.sleep(0.2)
    for held in builds._in_use.values():
        held.close()
    builds._in_use.clear()
    builds._last_built.clear()  # as in another process
    builds.MOST_BYTES = 0
    builds.remove_oldest(Path(folder).parent)
    built_now = Path(folder).is_dir()
    for path in [*Path(folder).rglob("*")][::-1]:
        path.rmdir() if path.is_dir() else path.unlink()
    Path(folder).rmdir()
    turns.__exit__(None, None, None)
    waiting.join(20)
    answer = [built_now, Path(folder, "deep", "ext.so").is_file()]
    """
    assert answer(tmp_path, code) == [True, True]
