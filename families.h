// SPDX-License-Identifier: MIT
// families.h: the fields that other families than Llama add to the structs of llm.c, which includes
// this file in each of them. In a Llama causal is true, a layer's source is itself, factors are 1,
// and nearly all else here is 0 or NULL. (Sections are llm.c's.)

#ifdef CONFIG_FIELDS
    bool verified;             // its logits are checked against llama.cpp's
    int rope, act;             // of layers with RoPE: ROPE_HALVES, _PAIRS; ACT_SILU, ...
    bool limit_first;          // the gate is clamped before its activation, not after (Maple)
    int n_loops;               // how often the file's layers run; n_layer counts all (Nanbeige)
    int n_nextn;               // blocks behind the layers that guess further tokens, see section 22
    bool nextn_raw, nextn_layer_norm;   // they read the bare stream (Step 3.5); end in a LayerNorm
    bool causal;               // a token does not see later ones; false in encoders
    bool encoder;              // norms follow the residual sum, and there are no logits (BERT)
    int pooling;               // of an embedding: -1 unsaid, 0 none, 1 mean, 2 first token, 3 last
    float embd_scale;          // factor of the embeddings (Gemma)
    bool embd_normed;          // embeddings are normed, without weights (Muse)
    float residual_scale;      // factor of what a block adds to the stream (Granite)
    float logit_scale, logit_cap;   // factor of the logits (Granite); their soft cap (Gemma 2) or 0
    int window;                // tokens that a query sees in windowed layers, itself included
    int span;                  // instead, it sees its own span of this many tokens (Llama 4); or 0
    int n_exact;               // up to this many tokens sparse attention sees all (DeepSeek); or 0
    float attn_cap;            // soft cap of the scores (Gemma 2); 0: none
    float clamp_qkv;           // q, k and v are held within -clamp_qkv .. clamp_qkv (OLMo); 0: not
    bool qk_norm_late;         // queries and keys are normed after RoPE, not before (Hunyuan)
    bool values_normed;        // values are normed, too, without weights (Gemma 4)
    bool softplus_gates;       // gates pass softplus, not a sigmoid (Laguna)
    float value_scale;         // factor of attention's result (MiMo 2)
    // positions, see Part III
    bool local_unscaled;       // windowed layers ignore the scaling below, except rope_mag;
    bool local_no_mag;         // they ignore rope_mag, too
    int n_ctx_orig;            // n_ctx before the scaling
    float rope_factor, rope_mag;   // frequencies are divided by it; factor of cosines and sines
    bool yarn;                 // YaRN slows low frequencies only, see rope_scaling
    float yarn_fast, yarn_slow, yarn_log;
    int section[4];            // M-RoPE: pairs for an image's time, height, width; the last: unused
    bool sections_mixed;       // the sections take turns (Qwen3-VL)
    float alibi;               // ALiBi's largest bias (BLOOM), see alibi_slopes; 0: no ALiBi
    float sharpen_scale;       // far out queries grow (Ministral 3), see sharpen; 0: not
    int sharpen_length;        // tokens after which they do
    // experts
    int n_expert, n_used;      // in a layer; that a token uses at most
    int n_group, n_group_used; // experts stand in groups, of which a token uses some (DeepSeek)
    bool routed_first;         // the router reads the stream before attention (SmallThinker)
    int gating;                // SOFTMAX or SIGMOID
    bool weights_normed;       // the weights of the chosen experts are divided by their sum
    float weights_scale;       // factor of their weights
    float router_scale;        // factor of the router's product, if its input is normed (Gemma 4)
    bool inputs_weighed;       // an expert's weight is a factor of its input, not result (Llama 4)
    // recurrent mixers
    int conv;                  // taps of the convolution: inputs that it sees
    int n_key, n_value;        // key heads and value heads
    int dk, dv;                // width of a key, of a value
    bool key_tiled;            // value head h reads key head h % n_key, not h / (n_value / n_key)
    int kda;                   // width of a head whose channels each have a decay (Kimi); or 0
    float kda_lower;           // below 0: a decay is exp(kda_lower * sigmoid(..)); 0: no bound
    // latent attention (DeepSeek), layers' own inputs (Gemma 4)
    int lora;                  // width of the latent
    int latent_hd, latent_vd;  // widths of the queries and values that it stands for
    int per_layer;             // width of each layer's own input; 0: none
#undef CONFIG_FIELDS
#endif

#ifdef LAYER_FIELDS
    int source;                // the layer whose cache it reads; in a Llama itself
    bool side_by_side;         // attention and FFN read the same stream (GPT-NeoX)
    Norm attn_post_norm, ffn_post_norm;   // [dim] of attention's result, of the FFN's (Gemma 2)
    Norm attn_norm_2, last_norm;   // [dim] after attention (JinaBERT), after the layer (Nanbeige)
    const float *out_scale;    // [1] factor of the stream after the layer (Gemma 4), or NULL
    Norm q_norm, k_norm;       // of heads, see Norm (Qwen 3); n 0: none
    Matrix attn_gate;          // [n_head or n_head * vd][dim] gates of attention, if q has none
    const float *sinks;        // [n_head] a score beside those of the keys (gpt-oss), or NULL
    float limit_ffn, limit_experts;   // of act(gate) and up (Step 3.5); 0: none
    struct { float alpha_n, alpha_p, beta, eps; } xielu;   // (Apertus)
    // experts: gate, up and down hold those of all, a step apart
    int n_used;                // experts that a token uses
    Matrix router;             // [n_expert][dim]
    const float *router_bias;  // [n_expert] for the choice only, or NULL
    Matrix shared_gate, shared_up, shared_down;   // an FFN for every token
    Matrix shared_router;      // [1][dim] makes its weight
    Matrix squeeze, unsqueeze;   // [wide][dim], [dim][wide]: experts read fewer numbers
    Norm router_norm, expert_norm, expert_post, shared_post;   // [dim] (Gemma 4, see load_experts)
    // latent attention, where there is a k_b
    Matrix q_a;                // [q.cols][dim]: q is two products
    Norm q_a_norm, latent_norm;   // [q.cols], [lora]
    Matrix k_b, v_b;           // of each head [lora][latent_hd - n_rot], [latent_vd][lora]
    // a recurrent mixer
    int mixer;                 // MIX_NONE, or one in place of attention or beside it
    Matrix conv_in;            // [channels][dim] what passes the convolution
    const float *conv, *conv_bias;   // [channels][taps], [channels]
    Matrix z, z_a;             // [n_value * dv][..] gates; where z is two products, the first
    Matrix alpha, alpha_a;     // [n_value][..] decays; where alpha is two products, the first
    Matrix beta, beta_alpha;   // [n_value][dim] how strongly it writes; or both in one tensor
    const float *dt_bias, *a, *skip;   // [n_value]; KDA: dt_bias [n_value][dk]
    Norm delta_norm;           // [dv]
    Matrix delta_out;          // [dim][n_value * dv]
    // its own input
    Matrix input_gate, input_proj;   // [per_layer][dim], [dim][per_layer]
    Norm input_norm;           // [dim]
    Norm embd_norm, state_norm, out_norm;   // of a block that guesses further tokens: [dim]
    Matrix joint, embd, output;   // [dim][2 * dim] makes its input; its own, or the model's
#undef LAYER_FIELDS
#endif

#ifdef MODEL_FIELDS
    Map *owned;                // [n_owned] copies of weights that had to be changed
    size_t n_owned;
    const float *freqs;        // [n_rot/2] what divides RoPE's frequencies (Llama 3.1), or NULL
    const float *freqs_long, *freqs_short;   // [n_rot/2] two more, of which one is taken (Phi 3)
    Norm embd_norm;            // [dim] of the embeddings (BLOOM)
    Matrix pos_embd;           // [n_ctx][dim] learned positions (GPT-2), or none
    Matrix type_embd;          // its first row is added to each embedding (BERT), or none
    Matrix dense[2];           // of the pooled embedding, one after the other (Gemma)
    Matrix layer_embd, layer_proj;   // [ids][n_layer * per_layer], [n_layer * per_layer][dim]
    Norm layer_norm;           // [per_layer]
    Error nextn_idle;          // why the file's nextn blocks do not run, or ""
#undef MODEL_FIELDS
#endif

#ifdef SESSION_FIELDS
    // guesses, see guess_ids
    int32_t *index;            // [n_index] positions; those up to n_indexed have been entered
    int n_index, n_indexed;
    int guesses;               // the last tokens of the chunk that are only guessed
    float *states;             // [chunk][dim] what nextn blocks read, see section 22
    int nextn_pos, loss, rest, pause;   // see nextn_follow; nextn_pays
    // buffers of forward; rows: choices of experts that run at once, n or, if that is more, n_used
    float *slopes;             // [n_head] of ALiBi
    float *inputs;             // [n][n_layer][per_layer] each layer's own
    float *mix;                // [n][n_head][2 * hd] q with gates, or latent queries; of recurrent
                               // mixers [conv-1 + n][channels]
    float *z;                  // [n][..] gates; of latent attention the input of q
    float *beta_alpha, *strength;   // [n][2 * n_value], [n][n_value] of the delta rule
    float *decay;              // [n][n_value] of it, in KDA [n][n_value][dk]
    float *route;              // [n][n_expert] the logits of a router
    int32_t *chosen;           // [n][n_used] a token's experts, the best first: its choices
    float *weight;             // [n][n_used] of the choices
    int32_t *order;            // [n * n_used] indices of all choices, sorted by expert
    float *gathered, *expert_out;     // [rows][dim or wide] what experts read; their results
    float *squeezed, *squeezed_sum;   // [n][wide] the experts' input, squeezed; their sum
    float *recurrent;          // [n_recurrent] conv and state of all layers
    size_t n_recurrent, n_kept;   // floats; n_kept: of a layer
    float *saved;              // [n_recurrent] a copy, the snapshot
    int saved_pos;             // where the snapshot was made; -1: there is none
    float *kept, *trial;       // [n_layer][n_kept] the guesses' inputs; one layer's state for them
    int seen;                  // tokens of the history that the states have seen: no guesses
#undef SESSION_FIELDS
#endif
