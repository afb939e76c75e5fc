"""TODO admission"""
