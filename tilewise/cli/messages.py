"""What the demonstrations say, in English and in Chinese: each text stands beside its twin.

Lines are at most 100 columns wide (a Chinese character takes two).
"""

from enum import Enum


class Language(str, Enum):
    EN = "en"
    ZH = "zh"


def message(language: Language, key: str, **values: object) -> str:
    """The text of that key with its {values} filled in."""
    english, chinese = _TEXTS[key]
    return (chinese if language is Language.ZH else english).format(**values)


_TEXTS: dict[str, tuple[str, str]] = {
    # ---------------------------------------------------------------- all demonstrations
    "demo": ("Demonstration {number}: {title}", "演示 {number}：{title}"),
    "passed": ("passed", "通过"),
    "failed": ("FAILED", "未通过"),
    "not run": ("not run", "未运行"),
    "check": (
        "Check: largest difference {difference} ≤ {tolerance}: {verdict}",
        "检验：最大误差 {difference} ≤ {tolerance}：{verdict}",
    ),
    "summary": ("Result: {verdict} {numbers}", "结果：{verdict} {numbers}"),
    "causal": ("causal", "因果掩码"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    "algorithm": ("algorithm", "算法"),
    "textbook": ("textbook", "教学版"),
    "standard": ("standard", "标准形式"),
    # ---------------------------------------------------------------- 1. online softmax
    "online.title": ("softmax in one pass", "只读一遍数据的 softmax"),
    "online.intro": (
        "A softmax that does not overflow needs m = max(x) and l = Σ exp(x − m). One pass\n"
        "is enough: keep both for what was read so far, and when a block raises the maximum,\n"
        "re-base the old sum: l ← l · exp(m_old − m_new) + Σ exp(x − m_new).",
        "数值稳定的 softmax 需要最大值 m = max(x) 和分母 l = Σ exp(x − m)，似乎要读两遍数据。\n"
        "其实一遍就够：逐块读入 x，随时维护已读部分的 m 和 l；一旦新的一块使最大值变大，\n"
        "就用修正因子更新旧的和：l ← l · exp(m_旧 − m_新) + Σ exp(x − m_新)。",
    ),
    "online.elements": ("elements read", "本块元素"),
    "online.rebase": ("exp(m_old − m_new)", "修正因子 exp(m_旧 − m_新)"),
    "online.lse": (
        "logsumexp: m + log l = {online}, torch.logsumexp = {torch}",
        "logsumexp：m + log l = {online}，torch.logsumexp = {torch}",
    ),
    "online.check": (
        "exp(x − m) / l against torch.softmax, and both logsumexp.",
        "将 exp(x − m) / l 与 torch.softmax 比较，并比较两种方法得到的 logsumexp。",
    ),
    # ---------------------------------------------------------------- 2. forward
    "forward.title": ("attention tile by tile", "分块计算注意力（前向）"),
    "forward.intro": (
        "n = {n} queries and keys, d = {d}, float64. The textbook takes {block_q} queries and\n"
        "{block_k} keys at a time; the n×n matrices S and P never exist as a whole. Largest\n"
        "differences of O:",
        "查询和键各 n = {n} 个，d = {d}，float64。教学版每次取 {block_q} 个查询、{block_k} 个键，\n"
        "只计算这一小块；n×n 的矩阵 S 和 P 从不完整地出现。输出 O 的最大误差：",
    ),
    "forward.standard": ("to softmax(QKᵀ/√d)V", "与 softmax(QKᵀ/√d)V 相比"),
    "forward.sdpa": (
        "to F.scaled_dot_product_attention",
        "与 F.scaled_dot_product_attention 相比",
    ),
    # ---------------------------------------------------------------- 3. backward
    "backward.title": ("gradients by recomputation", "用重计算求梯度（反向）"),
    "backward.intro": (
        "n = {n}, d = {d}, float64, loss = ΣO². Of the forward only Q, K, V, O and\n"
        "L = logsumexp(S) are kept; the backward computes P = exp(S − L) again. Largest\n"
        "differences to autograd through the standard form:",
        "n = {n}，d = {d}，float64，损失为 ΣO²。前向只保存 Q、K、V、O 和 L = logsumexp(S)；\n"
        "反向用 P = exp(S − L) 重新算出 P，这就是重计算。以标准形式的自动求导结果为准，\n"
        "梯度的最大误差：",
    ),
    # ---------------------------------------------------------------- 4. memory and traffic
    "memory.title": ("what is kept and what is moved", "存了多少、搬了多少"),
    "memory.intro": (
        "One head, d = {d}. By the formula, in BF16: the standard form keeps S and P, n×n\n"
        "numbers each; tiles keep L, n float32 numbers. Elements moved between slow and on-chip\n"
        "memory: 4nd + 4n² against n²d²/M (leading term); {on_chip} KB on the chip hold M = {M}.\n"
        "Measured on this machine ({device}, {dtype}): forward and backward, peak memory beyond\n"
        "the inputs.",
        "单个注意力头，d = {d}。理论值（BF16）：标准形式要保存 S 和 P，各 n×n 个数；\n"
        "分块算法只多保存 L，即 n 个 float32 数。慢速内存与片上存储之间搬运的元素个数：\n"
        "标准形式 4nd + 4n²，分块算法 n²d²/M（首项）；片上 {on_chip} KB 可存 M = {M} 个元素。\n"
        "本机实测（{device}，{dtype}）：前向加反向，输入之外的峰值内存。",
    ),
    "memory.keeps": ("S and P", "S 与 P"),
    "memory.peak": ("{algorithm}\nmemory", "{algorithm}\n内存"),
    "memory.time": ("{algorithm}\ntime", "{algorithm}\n时间"),
    "memory.progress": ("measuring {algorithm}, n = {n}", "正在测量：{algorithm}，n = {n}"),
    "memory.unaffordable": (
        "— {algorithm}, n = {n}: would take about {needed}; about {limit} are spent here.",
        "— {algorithm}，n = {n}：约需 {needed}，超出本演示的上限 {limit}。",
    ),
    "memory.died": (
        "— {algorithm}, n = {n}: stopped: {error}",
        "— {algorithm}，n = {n}：中止：{error}",
    ),
    "memory.no_counter": (
        "Peak memory is read with psutil on this system: pip install psutil",
        "在此系统上要用 psutil 读取峰值内存：pip install psutil",
    ),
    "memory.check": (
        "Check: tilewise stays within 64 MiB + 16 matrices of n×d at every n measured: {verdict}",
        "检验：每个实测的 n 上，tilewise 的峰值内存不超过 64 MiB + 16 个 n×d 矩阵：{verdict}",
    ),
    # ---------------------------------------------------------------- doctor
    "doctor.starts": (
        "Now the cases run: some seconds with --quick, else minutes on a CPU.",
        "下面逐个运行检验：--quick 只需几秒，完整检验在 CPU 上要几分钟。",
    ),
    # ---------------------------------------------------------------- 5. a language model
    "model.title": ("a language model on it", "让语言模型用上它"),
    "model.missing": (
        "{missing} missing. To run it:\n{install}",
        "缺少 {missing}。安装后即可运行：\n{install}",
    ),
    "model.starts": (
        "The model is loaded, and writes with each attention: some minutes on a CPU.",
        "正在加载模型，随后分别用两种注意力续写：在 CPU 上需要几分钟。",
    ),
    "model.loading": ("loading the model", "正在加载模型"),
    "model.progress": ("reading and writing with {algorithm}", "正在用 {algorithm} 阅读并续写"),
    "model.intro": (
        "SmolLM2-135M-Instruct (30 layers, 9 query heads on 3 key/value heads) reads {prompt}\n"
        "tokens of Python's own documentation and continues them greedily by {new} ({device},\n"
        "float32). The same weights, with tilewise and with the attention of transformers\n"
        "(eager: the standard form).",
        "SmolLM2-135M-Instruct（30 层，9 个查询头共用 3 个键/值头）先读 Python 自带文档的\n"
        "{prompt} 个 token，再用贪心解码续写 {new} 个（{device}，float32）。同样的权重，\n"
        "分别用 tilewise 和 transformers 自带的注意力（eager，即标准形式）运行。",
    ),
    "model.attention": ("attention", "注意力实现"),
    "model.peak": ("peak memory beyond the model", "模型之外的峰值内存"),
    "model.time": ("time", "时间"),
    "model.prompt": ("… end of the text:", "……原文结尾："),
    "model.continuation": ("Continuation:", "续写："),
    "model.check": (
        "Check: the same {new} tokens, largest difference of a logit {difference} ≤ "
        "{tolerance}: {verdict}",
        "检验：续写的 {new} 个 token 完全相同，logit 的最大误差 {difference} ≤ "
        "{tolerance}：{verdict}",
    ),
    # ---------------------------------------------------------------- plots
    "plot.written": ("Written: {path}", "已保存：{path}"),
    "plot.memory": ("Memory, one head, d = {d}", "内存占用（单头，d = {d}）"),
    "plot.keeps": ("S and P, BF16: kept by the standard form", "标准形式保存的 S 与 P（BF16）"),
    "plot.extra": ("L, float32: kept by tiles instead", "分块算法改为保存的 L（float32）"),
    "plot.measured_standard": ("standard form: peak measured here", "标准形式：本机实测峰值"),
    "plot.measured_tilewise": ("tilewise: peak measured here", "tilewise：本机实测峰值"),
    "plot.traffic": (
        "Traffic with slow memory, one head, d = {d}",
        "与慢速内存之间的数据搬运（单头，d = {d}）",
    ),
    "plot.moved_standard": ("standard form: 4nd + 4n²", "标准形式：4nd + 4n²"),
    "plot.moved_tilewise": ("tiles: n²d²/M, 100 KB on chip", "分块算法：n²d²/M（片上 100 KB）"),
    "plot.length": ("sequence length n", "序列长度 n"),
    "plot.bytes": ("bytes", "字节"),
    "plot.elements": ("elements moved", "搬运的元素个数"),
    "plot.tiles": (
        "{mask}\n{skipped} tiles skipped, {full} full, {edge} on an edge",
        "{mask}\n跳过 {skipped} 块，完整 {full} 块，边缘 {edge} 块",
    ),
    "plot.causal": ("causal", "因果掩码"),
    "plot.window": ("causal, sliding window of {size} keys", "因果滑动窗口，宽 {size} 个键"),
    "plot.queries": ("query i", "查询 i"),
    "plot.keys": ("key j", "键 j"),
    "plot.skipped": ("skipped: never loaded", "跳过：从不读入"),
    "plot.full": ("full: computed without a mask", "完整：无需掩码"),
    "plot.edge": ("edge: masked inside", "边缘：块内加掩码"),
    "plot.seen": ("where the visible keys end", "可见键的边界"),
}
