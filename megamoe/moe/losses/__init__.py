"""Auxiliary losses: functions of a Routing, each with a weight; any number of them can be set."""
