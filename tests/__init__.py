"""The tests are a package, so that those which start processes can import `tests.helpers` there."""
