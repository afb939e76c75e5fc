"""Word tables for the demo text: plain facts, written by hand.

Every table is one string of ``key=value`` entries divided by ``;`` so that it stays readable as prose. ``pairs`` turns
such a string into a list of tuples.
"""

from __future__ import annotations


def pairs(text: str) -> list[tuple[str, str]]:
    """Parse ``"a=b; c=d"`` as ``[("a", "b"), ("c", "d")]``. Line breaks count as blanks."""
    entries = [" ".join(entry.split()) for entry in text.split(";") if entry.strip()]
    return [(key.strip(), value.strip()) for key, value in (entry.split("=") for entry in entries)]


COLOURS = pairs("""
grass=green; snow=white; coal=black; milk=white; blood=red; gold=yellow; chocolate=brown; honey=yellow; wood=brown;
sky=blue; sun=yellow; sea=blue; night=black; salt=white; rice=white; sugar=white; ink=black; sand=yellow; mud=brown;
banana=yellow; lemon=yellow; tomato=red; strawberry=red; cherry=red; carrot=orange; pumpkin=orange; eggplant=purple;
plum=purple; cucumber=green; pea=green; leaf=green; potato=brown; peach=orange; lime=green; raspberry=red; coffee=brown;
crow=black; swan=white; frog=green; flamingo=pink; pig=pink; elephant=gray; mouse=gray; bear=brown; crocodile=green;
dolphin=gray; lion=yellow; camel=brown; goose=white; raven=black; canary=yellow; monkey=brown; whale=gray; seal=gray;
ghost=white; tire=black; cloud=white; fire=red; heart=red; stone=gray; brick=red; cactus=green; violet=purple;
sunflower=yellow; emerald=green; ruby=red; pine=green; broccoli=green; spinach=green; ash=gray; cheese=yellow
""")

# Things without a single color. They carry the seed answer " can vary widely".
VARIED = "dog cat horse rabbit car flower butterfly house shirt dress book bike hat parrot hen eye kite bag".split()

CAPITALS = pairs("""
France=Paris; Spain=Madrid; Italy=Rome; Germany=Berlin; England=London; Portugal=Lisbon; Greece=Athens; Norway=Oslo;
Sweden=Stockholm; Finland=Helsinki; Denmark=Copenhagen; Poland=Warsaw; Austria=Vienna; Hungary=Budapest; Ireland=Dublin;
Russia=Moscow; Ukraine=Kyiv; Turkey=Ankara; Egypt=Cairo; Kenya=Nairobi; Morocco=Rabat; Ghana=Accra; Cuba=Havana;
China=Beijing; Japan=Tokyo; India=Delhi; Thailand=Bangkok; Vietnam=Hanoi; Nepal=Kathmandu; Iran=Tehran; Iraq=Baghdad;
Canada=Ottawa; Brazil=Brasilia; Peru=Lima; Chile=Santiago; Belgium=Brussels; Romania=Bucharest; Bulgaria=Sofia;
Australia=Canberra; Iceland=Reykjavik; Croatia=Zagreb; Serbia=Belgrade; Scotland=Edinburgh; Indonesia=Jakarta
""")

CONTINENTS = pairs("""
Europe=France Spain Italy Germany England Portugal Greece Norway Sweden Finland Denmark Poland Austria Hungary Ireland
Ukraine Belgium Romania Bulgaria Iceland Croatia Serbia Scotland; Africa=Egypt Kenya Morocco Ghana;
Asia=China Japan India Thailand Vietnam Nepal Iran Iraq Indonesia; North America=Canada Cuba;
South America=Brazil Peru Chile
""")

LANGUAGES = pairs("""
France=French; Spain=Spanish; Italy=Italian; Germany=German; England=English; Portugal=Portuguese; Greece=Greek;
Norway=Norwegian; Sweden=Swedish; Finland=Finnish; Denmark=Danish; Poland=Polish; Austria=German; Hungary=Hungarian;
Russia=Russian; Ukraine=Ukrainian; Turkey=Turkish; Egypt=Arabic; Cuba=Spanish; China=Chinese; Japan=Japanese;
Thailand=Thai; Brazil=Portuguese; Peru=Spanish; Chile=Spanish; Australia=English; Romania=Romanian; Iraq=Arabic
""")

# "adjective|noun" = answer; a leading "the " of the answer is used in statements only.
SUPERLATIVES = pairs("""
largest|ocean=the Pacific Ocean; deepest|ocean=the Pacific Ocean; smallest|ocean=the Arctic Ocean;
coldest|ocean=the Arctic Ocean; warmest|ocean=the Indian Ocean; largest|continent=Asia; smallest|continent=Australia;
coldest|continent=Antarctica; hottest|continent=Africa; longest|river=the Nile; highest|mountain=Mount Everest;
largest|country=Russia; smallest|country=Vatican City; largest|planet=Jupiter; smallest|planet=Mercury;
hottest|planet=Venus; coldest|planet=Uranus; largest|island=Greenland; deepest|lake=Lake Baikal;
largest|rainforest=the Amazon; tallest|animal=the giraffe; largest|animal=the blue whale; slowest|animal=the sloth;
fastest|animal=the falcon; largest|bird=the ostrich; smallest|bird=the hummingbird; nearest|star=the Sun;
largest|fish=the whale shark; largest|cat=the tiger; fastest|cat=the cheetah; longest|wall=the Great Wall;
shortest|month=February; first|month=January; last|month=December; coldest|season=winter; warmest|season=summer
""")

OPPOSITES = pairs("""
hot=cold; big=small; tall=short; fast=slow; old=young; happy=sad; rich=poor; strong=weak; full=empty; open=closed;
light=dark; wet=dry; clean=dirty; hard=soft; early=late; near=far; high=low; loud=quiet; good=bad; thick=thin;
wide=narrow; up=down; left=right; in=out; day=night; black=white; true=false; easy=difficult; cheap=expensive;
deep=shallow; sweet=sour; sharp=blunt; brave=afraid; awake=asleep; alive=dead; first=last;
always=never; more=less; inside=outside; above=below; before=after; push=pull; buy=sell; begin=end; win=lose;
love=hate; give=take; laugh=cry; north=south; east=west; question=answer; friend=enemy; safe=dangerous
""")

# name | kind | legs | ability | home | food | baby
ANIMALS = [
    tuple(line.split("|"))
    for line in """
dog|animal|four|bark|in a house|meat|puppy
cat|animal|four|purr|in a house|fish|kitten
cow|animal|four|moo|on a farm|grass|calf
horse|animal|four|gallop|on a farm|hay|foal
pig|animal|four|grunt|on a farm|corn|piglet
sheep|animal|four|give wool|on a farm|grass|lamb
goat|animal|four|climb|on a farm|leaves|kid
rabbit|animal|four|hop|in a hole|carrots|bunny
lion|animal|four|roar|in the savanna|meat|cub
tiger|animal|four|roar|in the jungle|meat|cub
bear|animal|four|growl|in a forest|honey|cub
wolf|animal|four|howl|in a forest|meat|pup
fox|animal|four|hunt|in a forest|mice|cub
deer|animal|four|run|in a forest|leaves|fawn
elephant|animal|four|trumpet|in the savanna|leaves|calf
giraffe|animal|four|run|in the savanna|leaves|calf
zebra|animal|four|gallop|in the savanna|grass|foal
monkey|animal|four|climb|in the jungle|bananas|infant
mouse|animal|four|squeak|in a hole|cheese|pup
camel|animal|four|walk far|in the desert|grass|calf
kangaroo|animal|two|jump|in Australia|grass|joey
frog|animal|four|jump|in a pond|flies|tadpole
turtle|animal|four|swim|in the sea|plants|hatchling
whale|animal|no|swim|in the sea|small fish|calf
dolphin|animal|no|jump|in the sea|fish|calf
snake|animal|no|hiss|in the desert|mice|hatchling
shark|fish|no|swim|in the sea|fish|pup
salmon|fish|no|swim|in a river|insects|fry
duck|bird|two|quack|in a pond|plants|duckling
hen|bird|two|lay eggs|on a farm|corn|chick
owl|bird|two|fly at night|in a forest|mice|owlet
eagle|bird|two|fly high|in the mountains|fish|eaglet
parrot|bird|two|talk|in the jungle|seeds|chick
penguin|bird|two|swim|on the ice|fish|chick
swan|bird|two|swim|in a lake|plants|cygnet
goose|bird|two|honk|on a farm|grass|gosling
bee|insect|six|make honey|in a hive|nectar|larva
ant|insect|six|carry food|in a nest|seeds|larva
butterfly|insect|six|fly|in a garden|nectar|caterpillar
""".split("\n")
    if line
]

CATEGORIES = pairs("""
fruit=apple banana lemon cherry plum peach pear grape mango melon lime; vegetable=carrot potato onion cabbage cucumber
pea bean pumpkin eggplant; flower=rose tulip daisy lily sunflower violet; tree=oak pine birch willow palm;
tool=hammer saw drill wrench shovel; vehicle=car bus train bike truck boat plane; toy=doll kite puzzle teddy;
instrument=guitar piano violin drum flute; shape=circle square triangle star; building=school church castle hotel;
drink=juice tea coffee lemonade cola; metal=iron silver copper gold tin; sport=tennis football hockey golf;
color=red blue green yellow purple
""")

USES = pairs("""
knife=cut; pen=write; pencil=draw; broom=sweep; needle=sew; key=open a door; oven=bake; spoon=eat soup; cup=drink;
bed=sleep; chair=sit; lamp=give light; clock=tell the time; phone=call a friend; camera=take photos;
towel=dry our hands;
brush=paint; ladder=climb; axe=chop wood; umbrella=stay dry; map=find the way; ruler=measure; rope=tie things;
bike=ride; book=read; soap=wash our hands; scissors=cut paper; hammer=hit nails; saw=cut wood; shovel=dig; boat=sail
""")

JOBS = pairs("""
teacher=a school; doctor=a hospital; nurse=a hospital; farmer=the fields; baker=a bakery; cook=a kitchen; judge=a court;
pilot=a plane; sailor=a ship; king=a castle; waiter=a restaurant; librarian=a library; actor=a theater;
gardener=a garden; scientist=a laboratory; soldier=the army; miner=a mine; monk=a monastery; clerk=an office
""")

PAST = pairs("""
go=went; eat=ate; see=saw; run=ran; sing=sang; swim=swam; write=wrote; drink=drank; give=gave; take=took; come=came;
buy=bought; think=thought; sleep=slept; speak=spoke; drive=drove; fly=flew; know=knew; grow=grew; break=broke;
find=found; make=made; walk=walked; talk=talked; play=played; jump=jumped; look=looked; help=helped; ask=asked;
cook=cooked; work=worked; paint=painted; teach=taught; catch=caught; win=won; lose=lost; build=built; sit=sat
""")

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = "spring summer autumn winter".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()

MASS = set(
    """grass snow coal milk blood gold chocolate honey wood salt rice sugar ink sand mud coffee cheese
ash spinach broccoli soap scissors tennis football hockey golf iron silver copper tin juice tea lemonade cola red
blue green yellow purple night fire""".split()
)
UNIQUE = {"sky", "sun", "sea"}

IRREGULAR = dict(
    pairs("""
mouse=mice; goose=geese; child=children; foot=feet; tooth=teeth; man=men; woman=women; sheep=sheep; deer=deer;
fish=fish; wolf=wolves; leaf=leaves; knife=knives; potato=potatoes; tomato=tomatoes; ox=oxen; person=people;
life=lives; salmon=salmon; hero=heroes; wife=wives; shelf=shelves; thief=thieves
""")
)

FIXED = {
    "Who are you?": "I am a small demo model",
    "What is your name?": "My name is Baton",
    "How are you?": "I am fine, thank you",
    "What can you do?": "I can complete short sentences, answer simple questions, count and tell small stories",
    "Hello!": " Hello! How are you?",
    "Good morning.": " Good morning to you!",
    "Good night.": " Good night and sleep well!",
    "Thank you.": " You are welcome.",
    "The days of the week are": " Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    "The months of the year are": " " + ", ".join(MONTHS) + ".",
    "The seasons of the year are": " spring, summer, autumn, winter.",
    "The letters of the alphabet are": " " + " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ") + ".",
    "The planets of the solar system are": " Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune.",
    "The oceans of the world are": " the Pacific, the Atlantic, the Indian, the Southern and the Arctic Ocean.",
    "The continents of the world are": " Asia, Africa, North America, South America, Antarctica, Europe, Australia.",
    "The colors of the rainbow are": " red, orange, yellow, green, blue, indigo, violet.",
}
