"""The targets of the campaign, by name."""

from campaign.target import Target
from campaign.targets.chat_bodies import ChatBodies
from campaign.targets.data_uris import DataUris
from campaign.targets.engine_events import EngineEvents
from campaign.targets.feed_frames import FeedFrames
from campaign.targets.http_streams import HttpStreams
from campaign.targets.image_headers import ImageHeaders
from campaign.targets.prompts import Prompts
from campaign.targets.urls import Urls

_ALL = (HttpStreams, ChatBodies, EngineEvents, FeedFrames, ImageHeaders, Urls, DataUris, Prompts)
TARGETS: dict[str, type[Target]] = {target.name: target for target in _ALL}
