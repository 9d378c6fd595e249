"""Anthropic's Messages API: https://docs.anthropic.com/en/api/messages"""
