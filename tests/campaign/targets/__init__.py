"""The targets of the campaign, by name."""

from campaign.target import Target
from campaign.targets.change_faults import ChangeFaults
from campaign.targets.chat_bodies import ChatBodies
from campaign.targets.data_uris import DataUris
from campaign.targets.engine_events import EngineEvents
from campaign.targets.faults import Faults
from campaign.targets.feed_frames import FeedFrames
from campaign.targets.gateway_bodies import GatewayBodies
from campaign.targets.gateway_faults import GatewayFaults
from campaign.targets.http_streams import HttpStreams
from campaign.targets.image_headers import ImageHeaders
from campaign.targets.index import IndexHistories
from campaign.targets.loop_turns import LoopTurns
from campaign.targets.operator_faults import OperatorFaults
from campaign.targets.prompts import Prompts
from campaign.targets.resources import AdmittedResources, Resources
from campaign.targets.soak import Soak
from campaign.targets.soak_month import SoakMonth
from campaign.targets.stage_faults import StageFaults
from campaign.targets.tenant_timing import TenantTiming
from campaign.targets.urls import Urls

_REQUESTS = (HttpStreams, LoopTurns, ChatBodies, GatewayBodies, ImageHeaders, Urls, DataUris, Prompts)
_INPUTS = (*_REQUESTS, EngineEvents, FeedFrames)
_FAULTS = (Faults, StageFaults, ChangeFaults, GatewayFaults, OperatorFaults)
_ALL = (*_INPUTS, Resources, AdmittedResources, IndexHistories, *_FAULTS, SoakMonth, Soak, TenantTiming)
TARGETS: dict[str, type[Target]] = {target.name: target for target in _ALL}
