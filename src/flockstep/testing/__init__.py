"""The conformance checks: for flockstep's own components and for yours."""
