"""`FairOrder` gives each request of a model its place in the order in which requests start, so that tenants share GPU time. Pure.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over *GPU time*: a request's tag is the virtual time at which it would be
finished, if its tenant always had its share. The engines and the ingress's own queue start the request with the lowest tag first:

    start = max(virtual time, finish of the tenant's request before it);    tag = finish = start + GPU-seconds / weight

Virtual time is the mean start of the requests that had their first token lately, and each start moves it by at least a part of its cost
(`fair_lanes.py`). A tenant that asks little starts at the virtual time, so it goes before the backlog of one that asks for more than its
share, and one that comes anew starts level. A tenant's later requests take the virtual time of those that gave up. GPU-seconds are
expected at arrival, from the prompt and from the tenant's earlier requests. They are raised while an answer is longer than expected, and
corrected at its end. Nothing waits while an engine has room. Requests of a tenant that is far ahead of its share have tags that make them
give way in the engines (`fair_tags.py`). A tenant that is behind, because its requests wait at few replicas, has further ones spread by
load.

Requests of several ingresses meet in the engines. Once a second the ingresses exchange their virtual times, what they have charged each
tenant since, and what waits for it (`order_board.py`). A charge moves the tenant's finish at all ingresses.
"""

import math
from collections.abc import Iterable, Mapping
from heapq import heappush

from serve_app.core.fair_lanes import Account, Lane, Place
from serve_app.core.fair_tags import FIRST_TAG, tag_of
from serve_app.core.order_board import LaneWaits, Use
from serve_app.core.request import RequestState
from serve_app.core.step_costs import MeasuredCosts
from serve_app.core.tenants import PRIORITIES, Priority
from serve_app.core.trail import ENGINES_OWN_ENDS
from serve_app.core.usual_costs import GUESS, LATEST, RUNNING, answer_cost_s
from serve_app.core.wait_margin import LEAST_MARGIN

_LEAST_S = 1e-6
"""No request costs less, so that the tags of a tenant differ."""
_BEHIND = 5
"""Usual requests by which a tenant may be behind virtual time before its requests leave the replicas that have their prefixes cached."""
_NEARLY_ALL = 0.9
"""Part of all starts from which on a tenant is as good as alone: then the number of its requests shows its wait best."""
_MAX_LEAD_S = 5.0
"""Seconds that a tenant may have to wait because it has had more than its share before."""
_MAX_ACCOUNTS = 1000
"""With more tenants, those are forgotten that are level and have nothing that waits or is to be reported. Their usual costs are lost."""


class FairOrder:
    """The order of one model's requests at one ingress. A request costs some microseconds in all."""

    def __init__(self) -> None:
        self.costs = GUESS
        ends = (*[FIRST_TAG[priority] for priority in PRIORITIES[1:]], math.inf)
        self._lanes = {priority: Lane(end=end) for priority, end in zip(PRIORITIES, ends, strict=True)}
        self._places: dict[str, Place] = {}
        self._number = self._num_replicas = 0

    def learn(self, measured: MeasuredCosts) -> None:
        """Take in what the model's replicas have measured. Usual costs that were computed from the guess are forgotten."""
        if self.costs is GUESS:
            for lane in self._lanes.values():
                lane.usual_s = 0.0
                for queue in (lane, *lane.accounts.values()):
                    queue.usual.answer_s = queue.begun_s = None
                    queue.rate.forget()
        self.costs = measured

    def place(self, request: RequestState, tenant: str, weight: float, priority: Priority, now: float) -> None:
        """Take in a request that has arrived, and give it its number and its tag: the request with the lowest tag goes first.

        Args:
            tenant: Name of the tenant, "" for all requests without one.
            weight: The tenant's share of GPU time among those of its priority, > 0.
        """
        lane = self._lanes[priority]
        account = lane.accounts.get(tenant) or self._open_account(lane, tenant)
        if weight != account.weight:
            self._change_weight(account, lane, weight)
        if not account.num_waiting:
            account.tag_s = account.reached_s = 0.0
            account.rate.note(0, is_waiting=lane.is_full, now=now, virtual_s=lane.virtual_s)
            lane.active[account] = None
            lane.weights += weight
        if not lane.num_waiting:
            lane.rate.note(0, is_waiting=lane.is_full, now=now, virtual_s=lane.virtual_s)
        prompt_s, answer_s = account.usual.expected(request, lane.usual, self.costs)
        expected_s = max(prompt_s + answer_s, _LEAST_S)
        self._limit_lead(account, lane, now)
        account.waiting_s += expected_s
        account.num_waiting += 1
        lane.num_waiting += 1
        account.finish_s = max(lane.virtual_s, account.finish_s)  # time for which the tenant did not ask is not saved up
        account.charge(expected_s)
        needed_s, earlier_s = expected_s / account.weight, None
        if (tag_s := account.take_free(needed_s, lane.virtual_s)) is None:
            earlier_s, tag_s = account.tag_s, max(account.finish_s, account.tag_s)
            account.tag_s = tag_s
        start_s = tag_s - needed_s
        # Without keys all requests are of one account, which has nobody to give way to.
        ahead = tenant != "" and lane.usual_s > 0.0 and start_s > lane.ahead_from_s(account)
        request.priority = tag_of(priority, tag_s, is_ahead=ahead)
        request.gives_way = ahead or priority != "interactive"
        place = Place(lane, account, start_s, expected_s, prompt_s, earlier_s)
        self._places[request.request_id] = account.latest = place
        account.waiting[place] = None
        if start_s < next(iter(account.waiting)).start_s:
            account.waiting.move_to_end(place, last=False)
        request.spreads = self._is_behind(account, lane)
        request.number = self._number = self._number + 1

    def _change_weight(self, account: Account, lane: Lane, weight: float) -> None:
        """Give the tenant a new weight, and scale its lead over virtual time to it.

        The lead of an account that only has charges of other ingresses is not scaled: those are in virtual seconds of the tenant's weight.
        """
        if account.num_waiting:
            lane.weights += weight - account.weight
        if account.latest is not None:
            account.finish_s = lane.virtual_s + (account.finish_s - lane.virtual_s) * account.weight / weight
        account.weight = weight
        account.free_s.clear()

    def _is_behind(self, account: Account, lane: Lane) -> bool:
        """Return whether engines start requests of others that are due much later than this tenant's next one."""
        next_s = account.finish_s - lane.waiting_s(account) / account.weight
        return lane.virtual_s - next_s > _BEHIND * lane.usual_s > 0.0

    def _open_account(self, lane: Lane, tenant: str) -> Account:
        if len(lane.accounts) >= _MAX_ACCOUNTS:
            lane.accounts = {
                n: a for n, a in lane.accounts.items() if a.num_waiting or a.unreported_s or a.finish_s > lane.virtual_s
            }
        account = lane.accounts[tenant] = Account(tenant=tenant)
        return account

    def _limit_lead(self, account: Account, lane: Lane, now: float) -> None:
        """Limit the tenant's lead over virtual time to what it has waiting plus `_MAX_LEAD_S`.

        It has the rest because others asked for less: while engines had room, or because their requests waited at other replicas. Without
        a limit, a tenant that comes anew would be served alone until it has had as much.
        """
        if lane.is_full and (pace := lane.rate.pace(now)) is not None:
            lead_s = lane.waiting_s(account) / account.weight + _MAX_LEAD_S * pace
            account.finish_s = min(account.finish_s, lane.virtual_s + lead_s)

    def begin(self, request: RequestState, now: float) -> None:
        """Note that the request has its first token."""
        if (place := self._places[request.request_id]).waits:
            place.account.margin.learn(request, now, has_begun=True)
            self._leave_queue(place, 1, now)

    def charge(self, request: RequestState) -> None:
        """Charge a running answer as if it were to become twice as long, ``max_tokens`` at most, if that costs more than was charged.

        `end` corrects this, and the answer is charged again once it is twice as long. The tenant's next requests are expected to cost
        more, too: if only ended answers counted, a tenant of short answers that turns to long ones would have many of them started before
        the first one ends.
        """
        place = self._places[request.request_id]
        account, num_tokens = place.account, len(request.emitted_ids)
        request.charge_at = 2 * num_tokens
        answer_s = answer_cost_s(request, self.costs)
        usual_s = place.expected_s - place.prompt_s if account.usual.answer_s is None else account.usual.answer_s
        if answer_s > usual_s:
            account.usual.learn_answer(answer_s, RUNNING)
        more_s = place.prompt_s + answer_s * (1 + min(1.0, request.max_tokens / num_tokens)) - place.expected_s
        if more_s > 0.0:
            place.expected_s += more_s
            account.charge(more_s)

    def end(self, request: RequestState, now: float, *, prompt_begun: bool = False) -> None:
        """Correct the tenant's account by what the request cost.

        Args:
            prompt_begun: The engine had probably begun to compute the prompt, though no token has come. Then the tenant pays for it.
        """
        place = self._places.pop(request.request_id)
        account = place.account
        is_answered = bool(request.emitted_ids) or _has_answered_whole(request)
        if is_answered:
            cost_s = self._cost(request, place)
        else:
            cost_s = place.prompt_s if prompt_begun else 0.0
            if account.latest is place and place.earlier_tag_s is not None:
                account.tag_s = place.earlier_tag_s
            elif place.waits and account.tenant:  # without keys all start in the order of arrival
                heappush(account.free_s, (place.start_s, place.expected_s / account.weight))
        if place.waits:
            account.margin.learn(request, now, has_begun=is_answered)
            self._leave_queue(place, int(is_answered), now)
        account.charge(cost_s - place.expected_s)
        lane = place.lane
        if not (lane.num_waiting or lane.is_full or lane.elsewhere_s):  # no request waited for what it had
            lane.virtual_s = max(lane.virtual_s, account.finish_s)

    def note_queue(self, replica_id: str, waiting: int, held: Iterable[RequestState] = ()) -> None:
        """Note how many requests wait in the engine of a replica, and the requests that it has of this ingress."""
        unstarted = [request.priority for request in held if not request.emitted_ids] if waiting else []
        for lane in self._lanes.values():
            if waiting > sum(priority >= lane.end for priority in unstarted):
                lane.queueing.add(replica_id)
            else:
                lane.queueing.discard(replica_id)

    def note_fullness(self, num_replicas: int, first: RequestState | None, now: float) -> None:
        """Note for which priorities engines are full.

        They are if ``first``, the first request that waits at this ingress, has this priority or an earlier one, or if such requests wait
        in the engines of half of the replicas.
        While engines are not full, requests start as they come, which says nothing about waits.
        """
        self._num_replicas = num_replicas
        for lane in self._lanes.values():
            lane.look_who_is_next(now)
            is_full = (first is not None and first.priority < lane.end) or 2 * len(lane.queueing) >= max(1, num_replicas)
            if is_full is not lane.is_full:
                lane.is_full = is_full
                for queue in (lane, *lane.active):
                    is_waiting = is_full and queue.num_waiting > 0
                    queue.rate.note(0, is_waiting=is_waiting, now=now, virtual_s=lane.virtual_s)

    def forget_rates(self) -> None:
        """Forget how fast the queues moved, because there is a new replica."""
        for lane in self._lanes.values():
            for queue in (lane, *lane.accounts.values()):
                queue.rate.forget()

    def expected_wait_s(self, request: RequestState, now: float) -> float | None:
        """Return after how many seconds the tenant's latest request starts, if engines are full and it is known; else None."""
        return (self._waits_s(self._places[request.request_id], now) or (None,))[0]

    def longest_wait_s(self, request: RequestState, now: float) -> float | None:
        """Return the longest of the waits that the measurements give; None if engines have room or it is not known.

        The longest one decides who is refused. With one of them alone, waits swung between half and twice the expected ones for minutes.
        """
        return max(self._waits_s(self._places[request.request_id], now), default=None)

    def _waits_s(self, place: Place, now: float) -> tuple[float, ...]:
        """Return the expected waits of the tenant's latest request, the most probable one first; none if engines have room.

        The tenant's starts of the last ten seconds show it best, if it waits at this ingress alone. The pace of virtual time shows it, too:
        in a virtual second, the tenant's waiting requests get its weight in GPU-seconds. It counts what all others ask for, also those
        that do not wait just now, but leaps where many requests have given up. Until one of both is known, each tenant that waits is
        expected to have its share. Its share of the starts is not that of its weight: a tenant of long answers starts fewer.
        """
        lane, account = place.lane, place.account
        if not lane.is_full:
            return ()
        if (per_second := lane.rate.per_second(now)) is None:
            return self._wait_by_costs_s(lane, account)
        own = account.rate.per_second(now)
        by_starts_s = () if own is None else (account.num_waiting / own,)
        if own is not None and own > _NEARLY_ALL * per_second:
            return by_starts_s
        pace = lane.rate.pace(now)
        by_pace_s = () if pace is None else (lane.waiting_s(account) / (pace * account.weight),)
        if account.rate.is_long(now) and not lane.elsewhere_s.get(account.tenant):
            return by_starts_s + by_pace_s
        if by_pace_s:
            return by_pace_s
        if account.num_waiting == lane.num_waiting:
            return (account.num_waiting / per_second,)
        if lane.begun_s is None:
            return ()
        by_share_s = account.waiting_s / (per_second * lane.begun_s * account.weight / lane.weights)
        return (min((by_share_s, *by_starts_s)),)

    def _wait_by_costs_s(self, lane: Lane, account: Account) -> tuple[float, ...]:
        """Return how long the tenant's requests wait if each replica computes a GPU-second in a second; none while costs are unknown."""
        if self.costs is GUESS or lane.usual.answer_s is None:
            return ()
        mine_s = lane.waiting_s(account)
        all_s = sum(each.waiting_s for each in lane.active) + sum(lane.elsewhere_s.values())
        return (min(mine_s * lane.weights / account.weight, all_s) / max(1, self._num_replicas),)

    def wait_margin(self, request: RequestState) -> float:
        """Return the factor by which the request may wait longer than expected and still be in time.

        This is the least one for a tenant's only request: if all requests of a tenant were refused, its margin would never become less.
        """
        return self._places[request.request_id].account.margin.factor if self.num_ahead(request) else LEAST_MARGIN

    def num_ahead(self, request: RequestState) -> int:
        """Return how many other requests of the same tenant and priority have no first token yet."""
        return self._places[request.request_id].account.num_waiting - 1

    def report(self) -> LaneWaits:
        """Return virtual time, what waits for each tenant, and what it was charged since the last answered report, by priority."""
        found: dict[Priority, tuple[float, dict[str, Use]]] = {}
        for priority, lane in self._lanes.items():
            accounts = [each for each in lane.accounts.values() if each.num_waiting or each.unreported_s]
            found[priority] = (
                lane.virtual_s,
                {each.tenant: Use(each.waiting_s, each.unreported_s, each.weight) for each in accounts},
            )
        return found

    def answered(self, report: LaneWaits) -> None:
        """Note that the lease board has answered the report: its charges need not be reported again."""
        for priority, (_, uses) in report.items():
            for tenant, use in uses.items():
                if (account := self._lanes[priority].accounts.get(tenant)) is not None:
                    left_s = account.unreported_s - use.charged_s
                    account.unreported_s = left_s if abs(left_s) > _LEAST_S else 0.0  # no rest of rounding

    def learn_waits(self, elsewhere: LaneWaits) -> None:
        """Take in the greatest virtual time of the other ingresses, what waits there in all, and what they have charged."""
        for priority, lane in self._lanes.items():
            virtual_s, uses = elsewhere.get(priority, (0.0, {}))
            lane.elsewhere_s = {tenant: use.waiting_s for tenant, use in uses.items() if 0.0 < use.waiting_s < math.inf}
            if lane.virtual_s < virtual_s < math.inf:
                lane.virtual_s = virtual_s
            for tenant, use in uses.items():
                if use.charged_s and math.isfinite(use.charged_s):
                    account = lane.accounts.get(tenant) or self._open_account(lane, tenant)
                    account.finish_s = max(lane.virtual_s, account.finish_s) + use.charged_s

    def validate(self, requests: Mapping[str, RequestState]) -> None:
        """Assert the invariants."""
        assert self._places.keys() == requests.keys()
        waiting = [place for place in self._places.values() if place.waits]
        assert all(requests[name].emitted_ids or place.waits for name, place in self._places.items())
        for lane in self._lanes.values():
            assert lane.num_waiting == sum(account.num_waiting for account in lane.accounts.values())
            assert lane.num_waiting == sum(p.lane is lane for p in waiting)
            assert lane.active.keys() == {account for account in lane.accounts.values() if account.num_waiting}
            assert math.isclose(lane.weights, sum(account.weight for account in lane.active), abs_tol=1e-6)

    def _leave_queue(self, place: Place, num_begun: int, now: float) -> None:
        account, lane = place.account, place.lane
        place.waits = False
        del account.waiting[place]
        account.num_waiting -= 1
        lane.num_waiting -= 1
        account.waiting_s = account.waiting_s - place.expected_s if account.num_waiting else 0.0  # no rest of rounding
        if not account.num_waiting:
            account.free_s.clear()
            del lane.active[account]
            lane.weights = lane.weights - account.weight if lane.num_waiting else 0.0
        if num_begun:
            virtual_s = place.expected_s / account.weight
            lane.usual_s += LATEST * (virtual_s - lane.usual_s) if lane.usual_s else virtual_s
            lane.advance(place, now)
        for queue in (lane, account):
            if num_begun:
                usual_s = place.expected_s if queue.begun_s is None else queue.begun_s
                queue.begun_s = usual_s + LATEST * (place.expected_s - usual_s)
            is_waiting = lane.is_full and queue.num_waiting > 0
            queue.rate.note(num_begun, is_waiting=is_waiting, now=now, virtual_s=lane.virtual_s)

    def _cost(self, request: RequestState, place: Place) -> float:
        """Return the GPU-seconds of a request that has ended, and learn from them."""
        computed = request.prompt_tokens - min(request.trail.cached_tokens or 0, request.prompt_tokens)
        answer_s = answer_cost_s(request, self.costs)
        if request.prompt_tokens:
            place.account.usual.learn_prompt(computed / request.prompt_tokens)
        for queue in (place.account, place.lane):
            queue.usual.learn_answer(answer_s)
        return self.costs.seconds(computed_tokens=computed) + answer_s


def _has_answered_whole(request: RequestState) -> bool:
    """Return whether an engine has ended the request without a token, as it does for embeddings."""
    trail = request.trail
    return bool(trail.end) and trail.ends[-1:] == [trail.end] and trail.end not in ENGINES_OWN_ENDS
