"""The report counts comments, circles and arrows as it says."""

import ast

import pytest

from experiments.correctness import code_limits, code_report, source


def test_only_lines_that_hold_nothing_but_a_comment_are_counted():
    text = '# one\nx = 1  # not this\ns = """\n# nor this\n"""\nif x:\n    # two\n    pass\n'
    assert code_report.own_line_comments(text) == 2


def test_circles_are_found_through_other_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert code_report.find_circles(graph) == [["a", "b", "c"]]
    assert code_report.longest_chain(graph) == []
    assert code_report.longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]


def test_an_import_of_a_higher_package_is_an_arrow_up():
    graph = {"mtpjax.models.model": {"mtpjax.decoding.loop", "mtpjax.errors"}, "mtpjax.decoding.loop": set()}
    assert code_report.find_arrows_up(graph) == ["mtpjax.models.model -> mtpjax.decoding.loop"]


def test_imports_for_type_checkers_are_left_out_and_those_in_functions_are_not():
    text = "if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n"
    assert list(source.imported_names(ast.parse(text))) == [("b", "c")]


def test_the_report_is_printed_with_a_bar_beside_each_figure(capsys):
    code_report.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 19 and all("(bar: " in line for line in lines)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """`library({module: text})` writes files and returns the file of each module."""
    monkeypatch.setattr(code_limits, "ROOT", tmp_path)

    def write(texts):
        files = {module: tmp_path / f"{module}.py" for module in texts}
        for module, text in texts.items():
            files[module].write_text(text)
        return files

    return write


def test_questions_for_a_methods_classes_are_found_outside_its_folder_only(library):
    question = "isinstance(x, Medusa | a.MedusaParams)\ntype(x) is Medusa\n"
    match = "match x:\n    case Medusa():\n        pass\nisinstance(x, Shared)\n"
    modules = {
        "mtpjax.drafters.medusa.network": f"class Medusa: ...\nclass MedusaParams: ...\n{question}",
        "mtpjax.drafters.files.read": "class Shared: ...\n" + match,
        "mtpjax.drafters.eagle3.network": question,
    }
    places = ["files.read.py:3: Medusa", "eagle3.network.py:1: Medusa", "eagle3.network.py:1: MedusaParams"]
    places.append("eagle3.network.py:2: Medusa")
    assert code_limits.find_questions(library(modules)) == [f"mtpjax.drafters.{place}" for place in places]


def test_tables_of_methods_name_three_by_string_or_by_object(library):
    methods = ("mtp", "medusa", "eagle3")
    modules = {f"mtpjax.drafters.{name}.record": "RECORD = 1\n" for name in methods}
    imports = "".join(f"from mtpjax.drafters.{name}.record import RECORD as {name}\n" for name in methods)
    modules["objects"] = (
        imports.replace("RECORD as ", "") + "TABLE = {each.name: each for each in (mtp, medusa, eagle3)}\n"
    )
    modules["strings"] = "x: Literal['mtp', 'medusa', 'eagle3']\nPAIR = ('mtp', 'medusa')\n"
    assert code_limits.find_tables(library(modules)) == ["objects.py:4", "strings.py:1"]


def test_a_module_that_a_string_names_is_imported_unless_it_is_a_process(library):
    text = 'A = "mtpjax.b:NAME"\nB = [sys.executable, "-m", "mtpjax.c"]\n'
    modules = library({"mtpjax.a": text, "mtpjax.b": "", "mtpjax.c": ""})
    graph = code_limits.with_imports_by_string({module: set() for module in modules}, modules)
    assert graph == {"mtpjax.a": {"mtpjax.b"}, "mtpjax.b": set(), "mtpjax.c": set()}


def test_self_is_no_parameter_and_docstrings_are_no_code(library):
    text = 'class A:\n    """One\n    two."""\n\n    def f(self, a, *b, c, **d):\n        # no code\n        return 1\n'
    (file,) = library({"a": text}).values()
    assert code_limits.num_parameters(ast.parse(text).body[0].body[1]) == 4
    assert code_limits.count_lines(file) == (3, 2)
