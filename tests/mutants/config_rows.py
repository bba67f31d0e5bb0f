"""Faults in reading a configuration."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

V4 = "spyglass/config/read_v4.py"
READ = "spyglass/config/read.py"
FIELDS = "spyglass/config/fields.py"
JSON = "spyglass/config/json_file.py"
JSON_TEXT = "spyglass/config/json_text.py"
SAVED = "spyglass/config/saved_v4.py"
CACHE = "spyglass/config/cache.py"
SERVER = "spyglass/config/server.py"
TRAINING = "spyglass/config/training.py"
TABLE = "spyglass/ops/table.py"
ENGINE = "spyglass/config/engine.py"
MAIN = "spyglass/cli/main.py"
MODEL = "spyglass/config/model.py"
NUMBERS = "spyglass/config/numbers.py"
SHIPPED = "spyglass/config/shipped.py"
TESTS = "tests/unit/config"
ON_SERVER = "tests/unit/cli/test_serve.py -m 'not slow'"
ON_TRAINING = "tests/unit/train/test_finetune.py -k 'option or refused'"
ON_CACHE = "tests/unit/config/test_cache.py"
ON_SNAPSHOTS = "tests/unit/engine/test_snapshots.py tests/laws/test_caches.py"
ON_LIBRARY = "tests/ops/test_cpu_library.py"
ON_TRAINING_OPS = "tests/ops/test_training_ops.py"
ON_NUMBERS = "tests/unit/config/test_numbers.py"
ON_SHIPPED = "tests/unit/config/test_shipped.py"

CONFIG_ROWS: list[Mutant] = [
    Mutant(READ, "family not in FAMILIES", "not family.startswith('deepseek_v4')", TESTS, "families by prefix"),
    Mutant(V4, "if len(ratios) < num_layers:", "if not ratios:", TESTS, "a short schedule passes"),
    Mutant(V4, "if ratio not in known:", "if ratio < 0:", TESTS, "any ratio passes"),
    Mutant(V4, "return ratios[:num_layers]", "return ratios", TESTS, "draft stages taken for layers"),
    Mutant(V4, "rope=far if ratio else near", "rope=far", TESTS, "YaRN in window-only layers"),
    Mutant(V4, "yarn=None)", "yarn=yarn)", TESTS, "YaRN in the plain table"),
    Mutant(V4, "index_from=index if ratio == POOLED_CHOSEN", "index_from=index if ratio", TESTS, "ratio 128 selects"),
    Mutant(V4, '"hash" if index < num_hash', '"hash" if index <= num_hash', TESTS, "one hash layer too many"),
    Mutant(V4, "overlap=chosen", "overlap=False", TESTS, "no overlap at ratio 4"),
    Mutant(V4, "kv_dims=plain_dims", "kv_dims=plain_dims + 64", TESTS, "rope channels rounded to fp8"),
    Mutant(V4, "hadamard=True", "hadamard=False", TESTS, "no Hadamard in reference numerics"),
    Mutant(V4, "rows = FakeQuant(element=\"e4m3\", block=64)", "rows = FakeQuant(element=\"e4m3\", block=128)", TESTS,
           "row rounding in blocks of 128"),
    Mutant(V4, "q_head_norm=True", "q_head_norm=False", TESTS, "no per-head norm of q"),
    Mutant(V4, 'fields.fixed("norm_topk_prob", True)', "", TESTS, "unnormalised routing accepted"),
    Mutant(V4, "if num_layers == 0:", 'if "vision_dim" not in fields.values:', TESTS, "a tower by another sign"),
    Mutant(V4, 'rms_norm_eps=fields.number("rms_norm_eps", default=defaults.eps)', "rms_norm_eps=1e-6", TESTS,
           "a fixed eps"),
    Mutant(V4, "if num_heads % num_groups:", "if False:", TESTS, "groups need not divide the heads"),
    Mutant(V4, "if rope_dim % 2:", "if False:", TESTS, "an odd rope dimension passes"),
    Mutant(V4, "if dim & (dim - 1):", "if False:", TESTS, "any index width passes"),
    Mutant(V4, "    scaling.refuse_unseen()\n", "", TESTS, "unknown rope fields ignored"),
    Mutant(FIELDS, "isinstance(value, int) and not isinstance(value, bool)", "isinstance(value, int)", TESTS,
           "true is an integer"),
    Mutant(FIELDS, "<= abs(number) <= _LARGEST", "<= abs(number)", TESTS, "infinite numbers pass"),
    Mutant(FIELDS, "_LEAST_NORMAL <= abs(number)", "0 < abs(number)", TESTS, "numbers that vanish in float32 pass"),
    Mutant(V4, "MOST_EXPERTS // len(wiring.layers)", "MOST_EXPERTS", TESTS, "experts bounded per layer only"),
    Mutant(FIELDS, "same_kind = isinstance(got, bool) == isinstance(value, bool)", "same_kind = True", TESTS,
           "1 passes for true"),
    Mutant(FIELDS, "{self.file}: {self.prefix}{key}\"", "{self.file}: {key}\"", TESTS, "the section is not named"),
    Mutant(JSON_TEXT, "if len(value) < len(pairs):", "if False:", TESTS, "repeated keys pass"),
    Mutant(JSON_TEXT, "parse_constant=_refuse_constant, ", "", TESTS, "NaN passes as JSON"),
    Mutant(JSON, "except RecursionError:", "except ZeroDivisionError:", TESTS, "deep nesting is a traceback"),
    Mutant(JSON, "if not path.is_file():", "if not path.exists():", TESTS, "a folder is opened as a file"),
    Mutant(SAVED, "if HASHED in words[count:]:", "if False:", TESTS, "hashed layers anywhere"),
    Mutant(SAVED, 'near.number("rope_theta", above=1)', 'far.number("rope_theta", above=1)', TESTS, "bases mixed up"),
    Mutant(MODEL, "(2 if self.overlap else 1)", "1", TESTS, "overlapping pools read one group"),
    Mutant(ENGINE, "        if value is not None:\n", "        if name not in values:\n", TESTS, "environment wins"),
    Mutant(MAIN, "return INTERRUPTED", "return 0", "tests/unit/cli", "a key press looks like success"),
    Mutant(MAIN, "except SpyglassError as error:", "except ZeroDivisionError as error:", "tests/unit/cli",
           "our errors are a traceback"),
    Mutant(MAIN, "        refuse_empty(parser, arguments)\n", "", "tests/unit/cli/test_main.py",
           "an empty path is the folder here"),
    Mutant(MAIN, "if text and not written:", "if text:", "tests/unit/cli/test_main.py", "--lora= is the folder here"),
    Mutant(SHIPPED, "if path.name in shipped_adapters(root / name)]", "if False]", TESTS,
           "nobody says which model has the adapter"),
    Mutant(SHIPPED, "    if not os.fspath(name_or_path):\n        raise ConfigError(", "    if False:\n        raise ConfigError(", TESTS,
           "a model without a name is the folder here"),
    Mutant(SHIPPED, "    if not os.fspath(name_or_path):\n        raise AdapterError(", "    if False:\n        raise AdapterError(", TESTS,
           "an adapter without a name is the folder here"),
    Mutant(MAIN, "allow_abbrev=False", "allow_abbrev=True", "tests/unit/cli", "options abbreviated"),
    Mutant(NUMBERS, 're.compile(r"-?[0-9]+")', 're.compile(r"[-+]?[0-9]+")', ON_NUMBERS, "+1 is an integer"),
    Mutant(NUMBERS, 're.compile(r"-?[0-9]+")', 're.compile(r"-?\\d+")', ON_NUMBERS, "digits of other scripts"),
    Mutant(NUMBERS, 're.compile(r"-?[0-9]+")', 're.compile(r"[0-9]+")', ON_NUMBERS, "no integer below zero"),
    Mutant(NUMBERS, "_INTEGER.fullmatch(text)", "_INTEGER.match(text)", ON_NUMBERS, "an integer with something behind it"),
    Mutant(NUMBERS, "_NUMBER.fullmatch(text)", "_NUMBER.match(text)", ON_NUMBERS, "a number with something behind it"),
    Mutant(NUMBERS, " or not math.isfinite(value := float(text))", " or (value := float(text)) is None", ON_NUMBERS,
           "too large is infinite"),
    Mutant(NUMBERS, "(\\.[0-9]*)?|", "(\\.[0-9]+)?|", ON_NUMBERS, "no digit behind a point"),
    Mutant(NUMBERS, "|\\.[0-9]+)", ")", ON_NUMBERS, "no digit before a point"),
    Mutant(NUMBERS, "[eE][-+]?", "[eE]-?", ON_NUMBERS, "no plus in an exponent"),
    Mutant(NUMBERS, "{text[:40]!r} is no integer", "{text!r} is no integer", ON_NUMBERS, "a refusal as long as what was written"),
    Mutant(NUMBERS, "{text[:40]!r} is no finite", "{text!r} is no finite", ON_NUMBERS, "a refusal as long as the number"),
    Mutant(SHIPPED, "tuple(sorted(path.parent.name for path in root", "tuple((path.parent.name for path in root", ON_SHIPPED,
           "models in any order"),
    Mutant(SHIPPED, "tuple(sorted(path.parent.name for path in model", "tuple((path.parent.name for path in model", ON_SHIPPED,
           "adapters in any order"),
    Mutant(SHIPPED, "if path.is_dir() or len", "if len", ON_SHIPPED, "a shipped adapter hides a folder"),
    Mutant(SHIPPED, "path.is_dir() or len(path.parts) != 1:", "path.is_dir():", ON_SHIPPED, "a path is taken for a name"),
    Mutant(SHIPPED, "if not known and not having:", "if False:", ON_SHIPPED, "models without adapters refuse all"),
    Mutant(SHIPPED, "base.lower() == model_name.lower()", "base == model_name", ON_SHIPPED, "upper and lower case differ"),
    Mutant(SHIPPED, '.rpartition("/")[2]', "", ON_SHIPPED, "a hub's name is another model"),
    Mutant(SHIPPED, 'stated.rstrip("/")', "stated", ON_SHIPPED, "a path that ends with a slash has no name"),
    Mutant(SHIPPED, "    except ConfigError:\n", "    except ZeroDivisionError:\n", ON_SHIPPED, "a remark that fails"),
    Mutant(SHIPPED, "not isinstance(stated, str) or not stated", "not isinstance(stated, str)", ON_SHIPPED,
           "an adapter that says nothing is of another model"),
    Mutant(SERVER, "least=0, most=65_535", "least=0", ON_SERVER, "a port that cannot be"),
    Mutant(SERVER, '("max_waiting", "grace_seconds")', '("max_waiting",)', ON_SERVER, "a stop before it is asked for"),
    Mutant(SERVER, '            "max_held_bytes",\n', "", ON_SERVER, "memory below nothing"),
    Mutant(SERVER, '            "fetch_seconds",\n', "", ON_SERVER, "no time to fetch"),
    Mutant(SERVER, 'for name in ("api_key", "model_name", "cors_origin"):', 'for name in ("model_name", "cors_origin"):', ON_SERVER,
           "an empty key"),
    Mutant(SERVER, " and value.strip() for value", " for value", ON_SERVER, "a name of blanks"),
    Mutant(SERVER, "not isinstance(self.host, str) or not self.host", "not isinstance(self.host, str)", ON_SERVER, "no address"),
    Mutant(SERVER, "if getattr(self, name) not in allowed:", "if False:", ON_SERVER, "any word for a choice"),
    Mutant(TRAINING, "if getattr(self, name) not in allowed:", "if False:", ON_TRAINING, "any schedule"),
    Mutant(TRAINING, "if not DEVICES.fullmatch(self.device):", "if not DEVICES.match(self.device):", ON_TRAINING, "cuda:0x"),
    Mutant(TRAINING, '("epochs", "batch_tokens", "accumulate", "save_every", "rank")', '("epochs", "batch_tokens", "accumulate", "rank")',
           ON_TRAINING, "a state every 0 steps"),
    Mutant(TRAINING, 'require_count("warmup", self.warmup, least=0)', "pass", ON_TRAINING, "a warm-up below nothing"),
    Mutant(TRAINING, 'require_count("seed", self.seed, least=0)', "pass", ON_TRAINING, "a seed below 0"),
    Mutant(TRAINING, 'require_count("steps", self.steps, least=1)', "pass", ON_TRAINING, "no steps"),
    Mutant(TRAINING, "if not 0 < getattr(self, name) <= MOST_FACTOR:", "if not 0 <= getattr(self, name) <= MOST_FACTOR:", ON_TRAINING,
           "a rate of nothing"),
    Mutant(TRAINING, "if not 0 < getattr(self, name) <= MOST_FACTOR:", "if not 0 < getattr(self, name):", ON_TRAINING, "an endless rate"),
    Mutant(TRAINING, 'for name in ("lr", "alpha", "clip"):', 'for name in ("lr", "alpha"):', ON_TRAINING, "gradients of no length"),
    Mutant(TRAINING, "if not 0 <= self.dropout < 1:", "if not 0 <= self.dropout <= 1:", ON_TRAINING, "everything dropped"),
    Mutant(TRAINING, "if not 0 <= self.weight_decay <= MOST_FACTOR:", "if not self.weight_decay <= MOST_FACTOR:", ON_TRAINING,
           "weights that grow by themselves"),
    Mutant(TRAINING, "not self.minutes >= 0", "self.minutes < 0", ON_TRAINING, "NaN minutes"),
    Mutant(CACHE, "retention=text.sliding_window - 1", "retention=text.sliding_window - 2", ON_CACHE, "a window row too few kept"),
    Mutant(CACHE, "series = 2 if compressor.overlap else 1", "series = 1", ON_CACHE, "overlapping groups keep half of their rows' width"),
    Mutant(CACHE, "retention=compressor.group_rows", "retention=compressor.group_rows // 2", ON_CACHE, "an open group loses its first rows"),
    Mutant(CACHE, "                        snapshot=True,\n                    )\n                )\n", "                        snapshot=False,\n                    )\n                )\n",
           ON_SNAPSHOTS, "open groups are not in a snapshot"),
    Mutant(CACHE, "compressor.gated and (", "(", ON_CACHE, "rows without gates keep a state"),
    Mutant(CACHE, 'dtype="float32"', 'dtype="activation"', ON_CACHE, "open groups in bf16"),
    Mutant(TABLE, "return name if usable(device_type, dtype) else", "return name if True else", ON_LIBRARY, "kernels that cannot run"),
    Mutant(TABLE, "if which not in get_args(Which):", "if False:", ON_LIBRARY, "any word for the ops"),
    Mutant(TABLE, '"training" if _exists(op, "training") else "reference"', '"reference"', ON_TRAINING_OPS, "training without its own ops"),
    Mutant(TABLE, ' and which == "auto" and not prepare()', " and not prepare()", ON_LIBRARY, "the reference warns of kernels"),
]  # fmt: skip
