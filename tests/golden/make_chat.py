#!/usr/bin/env python3
"""Make the chat goldens: conversations rendered by Jinja2 from the templates that models are
published with.

  python3 tests/golden/make_chat.py --llama-cpp LLAMA_CPP \\
      --target models/SmolLM2-135M-Instruct.Q4_1.gguf --tool build/release/tests/tool_tokenize

Needs the packages gguf and jinja2. The templates are read from the llama.cpp source
(models/templates, tests/test-chat-template.cpp, the vocabularies' metadata) and from the target;
only the renderings are committed. --tool must recognise each template as the family that it is
rendered for."""
import argparse
import json
import os
import re
import subprocess
import sys

import gguf
import jinja2
import jinja2.sandbox

# Published with the models, in no file of the source above. Short enough to stand here.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set sys"
    "tem_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% se"
    "t system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['"
    "role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}{"
    "% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + syst"
    "em_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = messa"
    "ge['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + conten"
    "t.strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|"
    "start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | t"
    "rim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% "
    "endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>as"
    "sistant<|end_header_id|>\\n\\n' }}{% endif %}")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['conte"
    "nt'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>a"
    "ssistant\\n' }}{% endif %}")
QWEN2 = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ "
    "'<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}")


def turns(*contents, system=None):
    roles = ["user", "assistant"]
    out = [{"role": "system", "content": system}] if system is not None else []
    return out + [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


CONVERSATIONS = [
    turns("Hi"),
    turns("Hi", system="Be brief."),
    turns("Hi", "Hello!", "And now?"),
    turns("Hi", "Hello!", "And now?", "Bye."),
    turns("  spaces \n", " answer\n\n", "\u00a0more\u3000", system="  sys \n "),
    turns("\n\nlead", "\n\nlines", "x"),
    turns("caf\u00e9 \u4e2d\u6587 \U0001f600", "ok", "y", "z", "last", system="S"),
    turns("think", "<think>\nlong thought\n</think>\n\nshort answer", "more"),
    turns("think", "<think>\nlong thought\n</think>\n\nshort answer"),
    turns("think", "no mark, \n\nanswer"),
    turns("", "", "empty"),
    turns("q", system="/no_think"),
    turns("q", "a", "r", system="Be kind. /no_think"),
    turns("q", "a", "r", system="Be kind. /think \n"),
    turns("q", system="Own words only./system_override"),
    [{"role": "user", "content": "w"}, {"role": "assistant", "content": "calling"},
     {"role": "tool", "content": "18 C"}, {"role": "tool", "content": "rain"},
     {"role": "assistant", "content": "cold"}],
    [{"role": "user", "content": "w"}, {"role": "assistant", "content": "<think>a</think>b"},
     {"role": "tool", "content": "18 C"}, {"role": "assistant", "content": "<think>c</think>d"},
     {"role": "user", "content": "<tool_response>x</tool_response>"},
     {"role": "assistant", "content": "e"}, {"role": "assistant", "content": "f"}],
    [{"role": "system", "content": "S"}, {"role": "assistant", "content": "first"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}],
]


def test_templates(path):
    """name -> template_str of llama.cpp's own template test."""
    with open(path) as f:
        text = f.read()
    found = re.findall(r'/\* \.name= \*/\s+"([^"]+)",\s+'
                       r'/\* \.template_str= \*/\s+"((?:[^"\\]|\\.)*)"', text)
    return {n: json.loads('"' + t.replace("\\'", "'") + '"') for n, t in found}


def metadata_template(path):
    return gguf.GGUFReader(path).fields["tokenizer.chat_template"].contents()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--llama-cpp", required=True)
    p.add_argument("--target", required=True)
    p.add_argument("--tool", required=True)
    p.add_argument("--out", default=os.path.dirname(os.path.abspath(__file__)))
    args = p.parse_args()
    root = args.llama_cpp

    def jinja(name):
        with open(f"{root}/models/templates/{name}.jinja") as f:
            return f.read()
    listed = test_templates(f"{root}/tests/test-chat-template.cpp")
    inst = {k: [t for t in listed.values() if all(m in t for m in marks)][0] for k, marks in {
        "mistral-v0": ["'[INST] ' + message['content'] + ' [/INST]' }}",
                       "message['content'] + eos_token}}"],
        "mistral-v1": ["' [INST] ' + system_message"],
        "mistral-v3": ["\"[INST] \" + message"],
        "mistral-v3-tekken": ["\"[INST]\" + message"],
        "mistral-v7": ["'[SYSTEM_PROMPT] '"]}.items()}
    templates = {
        "chatml": CHATML, "chatml-bos": "{{ bos_token }}" + CHATML,
        "smollm2": metadata_template(args.target),
        "qwen1.5": metadata_template(f"{root}/models/ggml-vocab-qwen2.gguf"),
        "qwen2": QWEN2,
        "qwen2.5": jinja("Qwen-Qwen2.5-7B-Instruct"), "qwen3": jinja("Qwen-Qwen3-0.6B"),
        "smollm3-undated": jinja("HuggingFaceTB-SmolLM3-3B"),
        "llama2": LLAMA2, "llama3": LLAMA3,
        "llama3.1": jinja("meta-llama-Llama-3.1-8B-Instruct"),
        **inst,
    }
    refused = ["CohereForAI-c4ai-command-r-plus-tool_use", "google-gemma-2-2b-it",
                "Kimi-K2-Instruct", "microsoft-Phi-3.5-mini-instruct", "openai-gpt-oss-120b",
                "Qwen-QwQ-32B", "Qwen3-Coder", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1",
                "ibm-granite-granite-4.0", "MiMo-VL", "fireworks-ai-llama-3-firefunction-v2",
                "meetkai-functionary-medium-v3.1", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Ministral-3-14B-Reasoning-2512",
                "GLM-4.6", "Apertus-8B-Instruct", "openbmb-MiniCPM5-1B",
                "meetkai-functionary-medium-v3.2", "unsloth-mistral-Devstral-Small-2507"]

    def family(text):
        return subprocess.run([args.tool, "family"], input=text.encode(), stdout=subprocess.PIPE)
    bad = 0
    for name, text in [*templates.items(), ("llama3.1", jinja("meta-llama-Llama-3.2-3B-Instruct")),
                       ("llama3.1", jinja("meta-llama-Llama-3.3-70B-Instruct")),
                       ("mistral-v3-tekken", jinja("mistralai-Mistral-Nemo-Instruct-2407"))]:
        got = family(text).stdout.decode().strip()
        bad += got != name
        print(f"{name}: recognised" if got == name else f"{name}: recognised as {got[:100]}")
    for name in refused:
        got = family(jinja(name))
        bad += got.returncode == 0
        taken = "refused" if got.returncode else "TAKEN FOR " + got.stdout.decode().strip()
        print(f"{name}: {taken}")

    def raise_exception(message):
        raise jinja2.TemplateError(message)
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals["raise_exception"] = raise_exception
    rows = []
    for name, text in templates.items():
        template = env.from_string(text)
        for messages in CONVERSATIONS:
            for opened in (False, True):
                try:
                    want = template.render(messages=messages, add_generation_prompt=opened,
                                           bos_token="<s>", eos_token="</s>")
                except jinja2.TemplateError:
                    want = None
                rows.append({"family": name, "messages": messages, "open": opened, "text": want})
    with open(f"{args.out}/chat_renderings.json", "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    print(f"{len(rows)} renderings, {sum(r['text'] is None for r in rows)} refused by the template")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
