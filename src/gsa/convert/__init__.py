"""Pretrained Transformers become recurrent models: weight maps, beginnings of what is new, and checks."""

from gsa.convert.run import Conversion, Converted, convert, prepare
from gsa.convert.students import STUDENTS, Choices

__all__ = ["STUDENTS", "Choices", "Conversion", "Converted", "convert", "prepare"]
