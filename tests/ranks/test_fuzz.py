"""Drawn passes on several ranks against the whole batch in one process, in float64."""

from support.fuzzing import cases, check_on, fuzz


@fuzz(examples=150, case=cases(2))
def test_two_ranks_equal_the_whole_batch(two_ranks, case):
    check_on(two_ranks, case)


@fuzz(examples=100, case=cases(3))
def test_three_ranks_or_two_of_them_equal_the_whole_batch(three_ranks, case):
    check_on(three_ranks, case)
