"""Settings of the tests of trainers: what is captured."""

import pytest

from seqsplit.frontend import handle


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is made from now on, or the error in place of one."""
    made, build_plan = [], handle.build_plan

    def recording(*args, **kwargs):
        try:
            plan = build_plan(*args, **kwargs)
        except Exception as error:
            made.append(error)
            raise
        made.append(plan)
        return plan

    monkeypatch.setattr(handle, "build_plan", recording)
    return made
