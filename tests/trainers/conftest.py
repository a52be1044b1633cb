"""Settings of the tests of trainers: what is captured."""

import pytest

from seqsplit import api


@pytest.fixture
def plans(monkeypatch):
    """Every plan that is made from now on, or the error in place of one."""
    made, build_plan = [], api.build_plan

    def recording(*args, **kwargs):
        try:
            plan = build_plan(*args, **kwargs)
        except Exception as error:
            made.append(error)
            raise
        made.append(plan)
        return plan

    monkeypatch.setattr(api, "build_plan", recording)
    return made
