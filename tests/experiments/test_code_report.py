"""The report counts comments, circles and arrows as it says."""

from experiments.correctness import code_report


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
    assert list(code_report.imported_names(code_report.ast.parse(text))) == [("b", "c")]


def test_the_report_is_printed_with_a_bar_beside_each_figure(capsys):
    code_report.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ok", "FAIL"))]
    assert len(lines) == 10 and all("(bar: " in line for line in lines)
