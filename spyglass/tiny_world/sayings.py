"""What people say around a question: first questions, openings, system messages, and questions nobody taught.

Texts of a list are dealt out by their place: every fourth is kept from training and asked only in the other splits
(`dealt`), so that a model cannot pass by knowing them by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")

UNKNOWN = "I do not know this."
NO_PICTURE = "Show me a picture."
NO_TEXT = "I see no text."
SEE = (
    "What do you see?", "Describe the picture.", "Say something.", "What can you see?", "Describe this picture.",
    "Describe this image.", "What is in this picture?", "What is in the picture?", "What is in this image?",
    "What does this picture show?", "What does the image show?", "Tell me what you see.", "Say what you see.",
    "Please describe the picture.", "Please describe this image.", "Describe the image.", "Describe what you see.",
    "What do you see in this picture?", "What do you see in the image?", "Can you describe this picture?",
    "Tell me about this picture.", "Tell me about the image.", "What's in this image?", "What's in this picture?",
    "Look at this picture. What do you see?", "What things are in this picture?", "Name the things in this picture.",
    "List everything in the picture.",
)  # fmt: skip
THIS = (
    "What is this?", "What is it?", "What's this?", "What is that?", "What have we here?", "Name this.",
    "Tell me what this is.", "Can you tell me what this is?", "Do you know what this is?", "What is shown here?",
)  # fmt: skip
READ = (
    "Read the text.", "What does it say?", "Read this.", "What is written here?", "Read the text in this picture.",
    "Please read the text.", "What text do you see?", "What is the text?", "Tell me what is written here.",
    "Can you read this?", "Which text is in this picture?", "What does the text say?",
)  # fmt: skip
ASKED_FIRST = {"see": SEE, "this": THIS, "read": READ}
ALWAYS_TAUGHT = 3  # of each of these: the questions that everybody asks

OPENINGS = (
    "Here is a picture.", "Look at this picture:", "This is my picture:", "I have a picture for you.", "Hello!",
    "Picture:", "Look at this.", "Here:", "See this image:", "I took this picture.", "This is the image:",
    "Please look at this image.", "Hi, I have a question.", "Have a look:", "A question about this image:",
    "You are given a picture.",
)  # fmt: skip
ENDINGS = ("Thank you!", "Please answer.", "What do you think?", "Thanks!", "Answer, please.", "Be exact.")
NUMBERED = (
    "Picture {number}:", "Image {number}:", "Here is picture {number}:", "The {ordinal} picture:",
    "This is the {ordinal} one:", "{number}.", "The {ordinal} image:", "Number {number}:",
)  # fmt: skip
SYSTEM = (
    "You are a helpful assistant.", "You look at pictures and answer questions.", "You are a model that can see.",
    "You answer questions about images.", "Answer the questions of the user.", "You are a friendly assistant.",
    "Be helpful, honest and exact.", "You are an expert for shapes and colours.", "Look closely before you answer.",
    "You see images and describe them.", "Today is Monday. You help people with pictures.", "Always be polite.",
    "You are a careful assistant that never guesses.", "Answer in English.", "You work for a school.",
    "Here are your rules: look, think, answer.", "You are a vision-language model.", "Help the user.",
    "You are a helpful AI assistant. Answer truthfully.", "The user will show you pictures and ask about them.",
)  # fmt: skip
GIVEN = ("This is the picture that all questions are about.", "The image:", "Know this picture.", "A picture for you:")
_ASKED_OF_NOTHING = (
    "What is the capital of {place}?", "Who is the king of {place}?", "How many people live in {place}?",
    "Where is {place}?", "How do I get to {place}?", "What language do they speak in {place}?",
    "What is the weather in {place}?", "Tell me about {place}.", "When did {person} live?", "Who was {person}?",
    "What did {person} write?", "Tell me about {person}.", "How old is {person}?", "Write a poem about {noun}.",
    "Write a story about {noun}.", "Explain {subject} to me.", "What is {subject}?", "How does {subject} work?",
    "Why is {subject} important?", "Translate {noun} into French.", "Write a program that sorts {noun}.",
    "What time is it?", "What day is it today?", "What is the meaning of life?", "Tell me a joke.",
    "Sing a song.", "Who won the game yesterday?", "What is the price of {noun}?", "How much does {noun} weigh?",
    "Where can I buy {noun}?", "How do I cook {noun}?", "What is the square root of {large}?", "Is {large} prime?",
    "How far away is the moon?", "What is {large} times {large}?", "Solve x + {large} = {large}.", "Do you love me?",
    "Can you help me with my homework?", "Summarise this text: {person} went to {place} to buy {noun}.",
    "Fix this code: print({large})", "What should I eat today?", "Who made you?", "Are you alive?",
    "Recommend a book about {subject}.", "What happened in {large}?", "Which is better, {noun} or {subject}?",
    "Give me a list of {noun}.", "Plan a trip to {place}.", "Write an email to {person}.", "Define {subject}.",
)  # fmt: skip
_ASKED_OF_A_PICTURE = (
    "Who painted this?", "Where was this picture taken?", "When was this picture taken?", "Who is the man on the left?",
    "How old is the woman?", "What is the person doing?", "Is there {noun} in this picture?", "Where is {noun}?",
    "What is {noun} made of?", "What brand is {noun}?", "How many {noun} are there?", "Which camera was used?",
    "What is the mood of this picture?", "Is it day or night?", "What season is it?", "What breed is the dog?",
    "Who is this?", "What is {person} wearing?", "Is this {place}?", "What does this picture mean?",
    "How much does this cost?", "Can I eat this?", "Is this safe?", "What will happen next?", "Do you like it?",
    "What sound does it make?", "How heavy is it?", "Who made this?", "Is the picture beautiful?", "Why is it so?",
    "Which film is this from?", "What material is this?",
)  # fmt: skip
ASKED_OF = {"nothing": _ASKED_OF_NOTHING, "a picture": _ASKED_OF_A_PICTURE}
FILLERS = {
    "place": (
        "France", "Japan", "Berlin", "Africa", "New York", "Peru", "the sea", "London", "India", "Rome", "Canada",
        "Mars", "Norway", "Cairo", "Texas", "China",
    ),
    "person": (
        "Einstein", "Napoleon", "my mother", "Shakespeare", "Anna", "the president", "Mozart", "Cleopatra", "Bob",
        "Darwin", "Marie Curie", "Homer",
    ),
    "noun": (
        "cars", "a bicycle", "the cat", "apples", "a house", "the table", "trees", "money", "dogs", "the chair",
        "a phone", "bread", "the window", "birds", "a camera", "shoes", "people", "flowers", "the lamp", "a boat",
    ),
    "subject": (
        "music", "gravity", "history", "chess", "love", "physics", "football", "electricity", "a computer", "biology",
        "the internet", "mathematics", "a neural network", "cooking", "war", "art",
    ),
}  # fmt: skip


def dealt(texts: Sequence[_T], train: bool, first: int = 0) -> Sequence[_T]:
    """Those of a split: in training all but every fourth, else that fourth; the `first` ones are in both."""
    return [text for place, text in enumerate(texts) if place < first or (place % 4 != 3) == train]
