"""The targets of the campaign, by name."""

from campaign.target import Target
from campaign.targets.chat_bodies import ChatBodies
from campaign.targets.http_streams import HttpStreams
from campaign.targets.index import IndexHistories

TARGETS: dict[str, type[Target]] = {target.name: target for target in (HttpStreams, ChatBodies, IndexHistories)}
