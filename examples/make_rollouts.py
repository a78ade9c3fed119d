"""Writes the rollouts that come with the package: a library's assistant, several attempts at each of several tasks.

`python examples/make_rollouts.py` writes tree_compile/data/rollouts.jsonl again; the same file comes out every time.
All people, books and numbers are invented.

A task is one script played by one cast. The script is a list of turns, each with a few ways in which it can go. An
attempt picks one way at each turn, so attempts at one task agree for a while and then part, as samples of a policy do.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

TARGET = Path(__file__).resolve().parents[1] / "tree_compile" / "data" / "rollouts.jsonl"
ATTEMPTS = 8
ROLES = {"A": "assistant", "T": "tool", "U": "user"}

SYSTEM = """\
You are the assistant of the Harbour Street Library. Help readers with loans, rooms, fees and events.
Rules:
- Look a reader up before you change anything on an account.
- A loan is renewed at most twice, and never while another reader waits for the book.
- Fees up to 5.00 may be waived once a year. Larger fees go to a librarian.
- Rooms are booked for at most two hours a day. The library is open from 9:00 to 19:00.
- Never guess: say what you do not know, and keep answers short.
Tools, called as `call NAME ARGUMENTS`:
find_reader(card) -> name, loans, fees
find_loan(card, title) -> due, renewals, waiting
renew_loan(card, title) -> due
place_hold(card, title) -> place in the queue
set_aside(card, title) -> shelf
waive_fee(card, amount, reason) -> fees left
find_rooms(day, from, people) -> rooms
book_room(card, room, day, from, hours) -> code
find_events(month, age) -> events
sign_up(card, event, name) -> seat
to_librarian(card, note) -> ticket"""


@dataclass(frozen=True)
class Script:
    """A conversation with choices.

    Attributes:
        name: what it is about.
        opening: the reader's first message.
        turns: for each turn the ways it can go, the likeliest first. A way is a text of lines "A: …" (the assistant),
            "T: …" (a tool's answer) and "U: …" (the reader).
        casts: the words to put in, one dict per task.
    """

    name: str
    opening: str
    turns: tuple[tuple[str, ...], ...]
    casts: tuple[dict[str, str], ...]


RENEWAL = Script(
    name="renewal",
    opening=(
        "Hello, this is $first $last, card $card. Could you extend my loan of $title? "
        "It is due on $due and I am not quite done."
    ),
    turns=(
        (
            """\
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": ["$title", "$other"], "fees": "0.00"}""",
            """\
A: Happy to look, $first. May I have your postcode first, so that I know it is the right account?
U: Of course. It is $postcode.
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": ["$title", "$other"], "fees": "0.00"}""",
        ),
        (
            """\
A: call find_loan {"card": "$card", "title": "$title"}
T: {"due": "$due", "renewals": 1, "waiting": $waiting}""",
            """\
A: call renew_loan {"card": "$card", "title": "$title"}
T: {"error": "not renewed", "waiting": $waiting}""",
        ),
        (
            """\
A: I am sorry, $first, I cannot renew $title: $waiting other readers are waiting for it. I can put you back in the \
queue, so that you get it again after them. Shall I?
U: Yes, please do. How long will that take?""",
            """\
A: $waiting readers are waiting for $title, so it has to come back by $due. We do have a second copy in large print on \
the shelf. Would you like that one instead?
U: Oh, large print is easier on my eyes anyway. Yes, please.""",
            """\
A: That is not possible, because $waiting readers are waiting for it.
U: Is there really nothing you can do? I have two chapters left.
A: I understand, and I would like to help, but the rule protects the people who wait. I can add you to the queue again.
U: Fine. Put me in the queue then.""",
        ),
        (
            """\
A: call place_hold {"card": "$card", "title": "$title"}
T: {"title": "$title", "place": $place, "weeks": $weeks}""",
            """\
A: call set_aside {"card": "$card", "title": "$title, large print"}
T: {"title": "$title, large print", "shelf": "$shelf", "until": "$due"}""",
        ),
        (
            """\
A: It is done. I will not promise a day, but about $weeks weeks is usual for a list of this length. Please bring the \
copy you have back by $due, so that no fee is added.
U: Thank you, that is clear. I will read faster!
A: Enjoy the last chapters, $first.""",
            """\
A: All set, $first. Your other loan, $other, is not affected. Is there anything else?
U: Could you renew that one while you are there?
A: call renew_loan {"card": "$card", "title": "$other"}
T: {"title": "$other", "due": "$later"}
A: Done: $other is now due on $later.""",
            """\
A: All set, $first. You will get a message when it is ready.""",
        ),
    ),
    casts=(
        {
            "first": "Marta",
            "last": "Oyelaran",
            "card": "20417",
            "postcode": "HS2 4QT",
            "title": "The Salt Road",
            "other": "Bread for Beginners",
            "due": "14 March",
            "later": "4 April",
            "waiting": "3",
            "place": "4",
            "weeks": "9",
            "shelf": "B7",
        },
        {
            "first": "Tobias",
            "last": "Lindqvist",
            "card": "31882",
            "postcode": "HS9 1AB",
            "title": "A Short History of Bridges",
            "other": "Winter Birds",
            "due": "2 June",
            "later": "23 June",
            "waiting": "2",
            "place": "3",
            "weeks": "6",
            "shelf": "D2",
        },
    ),
)

ROOM = Script(
    name="room",
    opening=(
        "Hi! Our $group needs a room on $day from $start, we are $people people. My card is $card. What have you got?"
    ),
    turns=(
        (
            """\
A: call find_rooms {"day": "$day", "from": "$start", "people": $people}
T: {"rooms": [{"name": "$room", "seats": $seats}, {"name": "$hall", "seats": 40}]}""",
            """\
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": [], "fees": "0.00"}
A: call find_rooms {"day": "$day", "from": "$start", "people": $people}
T: {"rooms": [{"name": "$room", "seats": $seats}, {"name": "$hall", "seats": 40}]}""",
        ),
        (
            """\
A: Two rooms are free on $day at $start: $room, with $seats seats, and $hall, with 40. $room should fit you well. For \
how long do you need it?
U: Three hours would be perfect.""",
            """\
A: $room is free on $day at $start and has $seats seats. Shall I book it for two hours?
U: We would rather have three, is that possible?""",
        ),
        (
            """\
A: A room can be booked for two hours a day at most. I can book $room from $start for two hours. If nobody has booked \
it afterwards, you may ask at the desk to stay.
U: Good enough. Please book it.""",
            """\
A: I am afraid two hours is the limit. Would you like to split the meeting over two days, for instance on $day and on \
$next?
U: That is actually a good idea, half of us are late on the first day anyway. Book both, please.
A: call book_room {"card": "$card", "room": "$room", "day": "$next", "from": "$start", "hours": 2}
T: {"code": "$second_code", "room": "$room", "day": "$next"}""",
        ),
        (
            """\
A: call book_room {"card": "$card", "room": "$room", "day": "$day", "from": "$start", "hours": 2}
T: {"code": "$code", "room": "$room", "day": "$day"}""",
            """\
A: call book_room {"card": "$card", "room": "$room", "day": "$day", "from": "$start", "hours": 3}
T: {"error": "more than two hours"}
A: call book_room {"card": "$card", "room": "$room", "day": "$day", "from": "$start", "hours": 2}
T: {"code": "$code", "room": "$room", "day": "$day"}""",
        ),
        (
            """\
A: $room is yours on $day from $start, for two hours. The door code is $code. Please leave the chairs as you find them.
U: Will do. Is there a projector?
A: I do not know which equipment is in that room. The desk can tell you, and lends adapters as well.""",
            """\
A: Booked: $room, $day, $start, two hours, door code $code. Have a good meeting!""",
        ),
    ),
    casts=(
        {
            "group": "chess club",
            "first": "Ines",
            "last": "Carvalho",
            "card": "11763",
            "day": "Tuesday",
            "next": "Thursday",
            "start": "16:00",
            "people": "9",
            "room": "the Lantern Room",
            "seats": "12",
            "hall": "the Quay Hall",
            "code": "4471",
            "second_code": "9026",
        },
    ),
)

FEE = Script(
    name="fee",
    opening=(
        "Good morning. I got a letter about a fee of $fee on card $card, but I brought $title back on time. "
        "$first $last is the name."
    ),
    turns=(
        (
            """\
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": [], "fees": "$fee", "note": "$title returned $days days late"}""",
            """\
A: I am sorry about the letter, $first. Let me see what the account says.
U: Thank you.
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": [], "fees": "$fee", "note": "$title returned $days days late"}""",
        ),
        (
            """\
A: The system has $title as returned $days days late, and that is where the fee of $fee comes from. Did you use the \
box at the door or the desk?
U: The box, on a $weekday evening. It was already dark, after you had closed.""",
            """\
A: According to the account the book came back $days days late. Can you tell me how you returned it?
U: I threw it in the box by the door on $weekday night.
A: Was the library open on the next day?
U: No, I think that was the $holiday.""",
        ),
        (
            """\
A: That explains it. The box is emptied when we open, and we were closed for the $holiday, so the book was counted too \
late. I will ask for the fee to go away.""",
            """\
A: Thank you. Books from the box count from the day it is emptied, so a closed day can make them look late. The fee is \
not your mistake.""",
        ),
        (
            """\
A: call waive_fee {"card": "$card", "amount": "$fee", "reason": "returned in the box before the $holiday"}
T: $outcome""",
            """\
A: call to_librarian {"card": "$card", "note": "$title was in the box before the $holiday, fee $fee disputed"}
T: {"ticket": "$ticket", "answer": "within three working days"}""",
            """\
A: May I waive it as this year's one free waiver?
U: No, it was not my fault, so I should not have to use that up.
A: You are right, that would not be fair. I will pass it to a librarian instead.
A: call to_librarian {"card": "$card", "note": "reader disputes fee $fee, closed day, does not want the waiver used"}
T: {"ticket": "$ticket", "answer": "within three working days"}""",
        ),
        (
            """\
A: I have done what I can from here, $first: the case is noted under $ticket and nothing is to be paid while it is open.
U: That is kind. Will I hear from you?
A: Yes, by letter or by mail, within three working days.""",
            """\
A: That is all from my side. You need not do anything more, and please accept our apologies for the letter.
U: No harm done. Have a nice day!""",
        ),
    ),
    casts=(
        {
            "first": "Eleni",
            "last": "Papadaki",
            "card": "28455",
            "title": "Garden Ponds",
            "fee": "3.60",
            "days": "3",
            "weekday": "Friday",
            "holiday": "spring holiday",
            "ticket": "L-208",
            "outcome": '{"fees": "0.00", "waivers left this year": 0}',
        },
        {
            "first": "Duncan",
            "last": "Abara",
            "card": "50613",
            "title": "Atlas of Lost Rivers",
            "fee": "7.20",
            "days": "6",
            "weekday": "Sunday",
            "holiday": "stocktaking days",
            "ticket": "L-231",
            "outcome": '{"error": "more than 5.00, ask a librarian", "ticket": "L-231"}',
        },
    ),
)

EVENT = Script(
    name="event",
    opening="My $child, $name, is $age and loves $topic. Is there something for $name at the library in $month?",
    turns=(
        (
            """\
A: call find_events {"month": "$month", "age": $age}
T: {"events": [{"name": "$event", "day": "$day", "seats": $seats}, {"name": "$fallback", "day": "$other_day", \
"seats": 11}]}""",
            """\
A: How nice! Should it be on a weekday or at the weekend?
U: Whatever is there, we are flexible.
A: call find_events {"month": "$month", "age": $age}
T: {"events": [{"name": "$event", "day": "$day", "seats": $seats}, {"name": "$fallback", "day": "$other_day", \
"seats": 11}]}""",
        ),
        (
            """\
A: There are two: "$event" on $day, which sounds right for somebody who loves $topic, and "$fallback" on $other_day. \
The first has $seats seats left. Shall I sign $name up?
U: The first one, please! Our card is $card.""",
            """\
A: I found "$event" on $day and "$fallback" on $other_day. Both are free of charge.
U: Which one would you take?
A: For $topic I would take "$event", but it has only $seats seats left.
U: Then quickly, before it is full. Card $card.""",
            """\
A: "$fallback" on $other_day has plenty of seats and suits age $age.
U: Is there nothing about $topic?
A: There is: "$event" on $day. I should have said so first. It has $seats seats left.
U: That is the one. Our card is $card.""",
        ),
        (
            """\
A: call find_reader {"card": "$card"}
T: {"name": "$parent", "loans": ["$loan"], "fees": "0.00"}
A: call sign_up {"card": "$card", "event": "$event", "name": "$name"}
T: {"event": "$event", "seat": $seat}""",
            """\
A: call sign_up {"card": "$card", "event": "$event", "name": "$name"}
T: {"error": "reader not looked up"}
A: call find_reader {"card": "$card"}
T: {"name": "$parent", "loans": ["$loan"], "fees": "0.00"}
A: call sign_up {"card": "$card", "event": "$event", "name": "$name"}
T: {"event": "$event", "seat": $seat}""",
        ),
        (
            """\
A: $name has seat $seat at "$event" on $day. Please be there ten minutes early and bring a pencil.
U: Does a parent have to stay?
A: I do not know for this event. Usually parents of children under eight stay, and I can ask a librarian if you like.
U: No need, I will bring a book. Thanks!""",
            """\
A: Done, $parent. $name has seat $seat on $day. We look forward to it!
U: So do we. Thank you!""",
        ),
    ),
    casts=(
        {
            "child": "daughter",
            "name": "Wilma",
            "age": "7",
            "topic": "the stars",
            "month": "October",
            "event": "A Night Under the Dome",
            "day": "18 October",
            "fallback": "Puppets and Porridge",
            "other_day": "25 October",
            "seats": "2",
            "seat": "15",
            "card": "60227",
            "parent": "Henrik Vale",
            "loan": "The Moon Explained",
        },
    ),
)

LOST = Script(
    name="lost",
    opening="I have a confession to make: $title, which I borrowed on card $card, $mishap. What do I do now?",
    turns=(
        (
            """\
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": ["$title"], "fees": "0.00"}""",
            """\
A: Thank you for telling us, that helps. Let me look at your account.
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": ["$title"], "fees": "0.00"}""",
        ),
        (
            """\
A: These things happen, $first. Do you still have the book, or is it gone?
U: $state""",
            """\
A: call find_loan {"card": "$card", "title": "$title"}
T: {"due": "$due", "renewals": 0, "waiting": 0}
A: The loan runs until $due, so there is no hurry, and no late fee. Do you still have it?
U: $state""",
        ),
        (
            """\
A: Then there are two ways: you pay what the book costs, which a librarian has to fix, or you bring a new copy of the \
same edition. Which do you prefer?
U: I would rather buy a new copy. Where can I find which edition it was?""",
            """\
A: You can replace it with a copy of the same edition. I do not know what the library would charge otherwise, only a \
librarian can say that.
U: A new copy is fine. Which edition is it?""",
            """\
A: A librarian will tell you what it costs. Shall I pass it on?
U: Can I not simply buy another one and bring it in?
A: Yes, you can, as long as it is the same edition.
U: Then I will do that. Which one is it?""",
        ),
        (
            """\
A: I cannot see the edition from here, so I will ask a librarian to write to you.
A: call to_librarian {"card": "$card", "note": "$title damaged or lost, reader replaces it, please send the edition"}
T: {"ticket": "$ticket", "answer": "within three working days"}""",
            """\
A: call renew_loan {"card": "$card", "title": "$title"}
T: {"title": "$title", "due": "$later"}
A: I have renewed the loan until $later, so that you have time. For the edition I ask a librarian.
A: call to_librarian {"card": "$card", "note": "please send the edition of $title, reader replaces it"}
T: {"ticket": "$ticket", "answer": "within three working days"}""",
        ),
        (
            """\
A: You will hear from us under $ticket. Thank you for being honest about it, $first.
U: Thank you for being so kind about it.""",
            """\
A: That is noted under $ticket. Once the new copy is here, the loan is closed and nothing is owed.
U: Perfect. And sorry again!
A: No need. $consolation""",
        ),
    ),
    casts=(
        {
            "first": "Priya",
            "last": "Novak",
            "card": "39904",
            "title": "Knots and Splices",
            "mishap": "went overboard with my rucksack",
            "state": "It is at the bottom of the harbour, I am afraid.",
            "due": "30 August",
            "later": "20 September",
            "ticket": "L-245",
            "consolation": "At least it went down in the right surroundings.",
        },
    ),
)

SEARCH = Script(
    name="search",
    opening="I am looking for a book, but all I remember is $memory. I read it as a child. My card is $card.",
    turns=(
        (
            """\
A: That could be $title by $author. Does that name ring a bell?
U: $author, yes! I am almost sure.""",
            """\
A: Do you remember roughly when you read it, or anything else about it?
U: About thirty years ago. $detail
A: Then I think it is $title by $author.
U: That is it! How did you do that?""",
            """\
A: It might be $wrong. Does that sound right?
U: No, that one I know. $detail
A: Then perhaps $title by $author?
U: Yes! That is the one.""",
        ),
        (
            """\
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": [], "fees": "0.00"}
A: call set_aside {"card": "$card", "title": "$title"}
T: {"error": "all copies are out", "waiting": $waiting}""",
            """\
A: call set_aside {"card": "$card", "title": "$title"}
T: {"error": "reader not looked up"}
A: call find_reader {"card": "$card"}
T: {"name": "$first $last", "loans": [], "fees": "0.00"}
A: call set_aside {"card": "$card", "title": "$title"}
T: {"error": "all copies are out", "waiting": $waiting}""",
        ),
        (
            """\
A: We have it, but all copies are out, and $waiting readers wait for it. Shall I put you on the list?
U: Yes, I have waited thirty years, a few weeks will not hurt.
A: call place_hold {"card": "$card", "title": "$title"}
T: {"title": "$title", "place": $place, "weeks": $weeks}""",
            """\
A: All copies are out at the moment. I can put you on the list, or look for something else by $author.
U: The list, please. And what else is there by $author?
A: call place_hold {"card": "$card", "title": "$title"}
T: {"title": "$title", "place": $place, "weeks": $weeks}
A: You are on the list. $sequel is by the same author, and it is about as long.
U: I did not know there was another one!
A: call set_aside {"card": "$card", "title": "$sequel"}
T: {"title": "$sequel", "shelf": "$shelf", "until": "Saturday"}""",
        ),
        (
            """\
A: You are number $place in the queue, $first. That is about $weeks weeks. We will write to you.
U: Wonderful, thank you.""",
            """\
A: Your place is $place, which means about $weeks weeks. Is there anything else that you half remember?
U: Ha! Not today. Thank you, $goodbye.""",
        ),
    ),
    casts=(
        {
            "first": "Lucia",
            "last": "Moreau",
            "card": "41175",
            "memory": "a lighthouse keeper who collects clocks",
            "detail": "In the end all the clocks strike at once and the storm stops.",
            "title": "The Keeper of Hours",
            "author": "Edda Marlowe",
            "wrong": "Lanterns at Low Tide",
            "sequel": "The Keeper's Daughter",
            "waiting": "1",
            "place": "2",
            "weeks": "5",
            "shelf": "C4",
            "goodbye": "you made my week",
        },
    ),
)

SCRIPTS = (RENEWAL, ROOM, FEE, EVENT, LOST, SEARCH)


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Writes the rollouts that come with the package.")
    parser.add_argument("--out", type=Path, default=TARGET, help="file to write")
    target = parser.parse_args().out
    target.write_text("".join(json.dumps(rollout) + "\n" for rollout in rollouts()), encoding="utf-8")
    print(f"wrote {target}")


def rollouts() -> Iterator[dict[str, object]]:
    """Yields all attempts at all tasks, task by task."""
    for script in SCRIPTS:
        for number, cast in enumerate(script.casts, start=1):
            for attempt in range(ATTEMPTS):
                task = f"{script.name}-{number}"
                choice = random.Random(f"{task}/{attempt}")
                yield {"task": task, "attempt": attempt, "messages": play(script, cast, choice)}


def play(script: Script, cast: dict[str, str], choice: random.Random) -> list[dict[str, str]]:
    """Plays a script once, with the ways to go drawn from `choice`."""
    lines = [line for turn in script.turns for line in pick(turn, choice).split("\n")]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": fill(script.opening, cast)}]
    for line in lines:
        role, content = line.split(": ", 1)
        messages.append({"role": ROLES[role], "content": fill(content, cast)})
    return messages


def pick(turn: tuple[str, ...], choice: random.Random) -> str:
    """Draws one way to go; each is half as likely as the one before it."""
    return choice.choices(turn, weights=[2.0**-place for place in range(len(turn))])[0]


def fill(text: str, cast: dict[str, str]) -> str:
    """Puts a cast's words into a text."""
    return Template(text).substitute(cast)


if __name__ == "__main__":
    main()
