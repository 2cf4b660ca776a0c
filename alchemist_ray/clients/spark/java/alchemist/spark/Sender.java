package alchemist.spark;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Collections;
import java.util.Iterator;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.WeakHashMap;
import java.util.zip.Deflater;
import java.util.zip.DeflaterOutputStream;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.mllib.linalg.Matrix;
import org.apache.spark.mllib.linalg.distributed.IndexedRow;
import org.apache.spark.rdd.RDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.columnar.CachedBatch;
import org.apache.spark.sql.execution.columnar.DefaultCachedBatch;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.storage.StorageLevel;
import scala.Some;
import scala.Tuple2;

/**
 * Counts rows, and sends rows and blocks to the ranks from executors. The session calls it through
 * py4j.
 *
 * <p>A task returns its report, or its failure, as JSON: if it failed, Spark would repeat it, and
 * rows would be written twice. Errors of the data's own computation fail the task as usual.
 */
public final class Sender {
    private static final Map<RDD<?>, String> COUNTS =
            Collections.synchronizedMap(new WeakHashMap<>());

    private Sender() {}

    /** The elements of one partition of an RDD, and its number. */
    private static final class Part {
        final int number;
        final Iterator<?> elements;

        Part(int number, Iterator<?> elements) {
            this.number = number;
            this.elements = new Elements(elements);
        }
    }

    /** Rows, or batches of them. An error of their source must not be taken for one of sending. */
    private static final class Elements implements Iterator<Object> {
        private final Iterator<?> source;

        Elements(Iterator<?> source) {
            this.source = source;
        }

        @Override
        public boolean hasNext() {
            try {
                return source.hasNext();
            } catch (Exception error) { // Scala does not declare its exceptions
                failIfUnread(error);
                throw error;
            }
        }

        @Override
        public Object next() {
            try {
                return source.next();
            } catch (Exception error) {
                failIfUnread(error);
                throw error;
            }
        }

        private static void failIfUnread(Exception error) {
            if (error instanceof IOException) {
                throw new UncheckedIOException(
                        "Spark could not read the rows: their source, for example a Python worker, "
                                + "has ended",
                        (IOException) error);
            }
        }
    }

    /** The rows of a DataFrame in Spark's internal form. */
    public static JavaRDD<InternalRow> rows(Dataset<Row> frame) {
        return frame.queryExecution().toRdd().toJavaRDD();
    }

    /** Batches of Spark's cache, or null: {@link Batches#stored}. */
    public static Batches stored(Dataset<Row> frame) {
        return Batches.stored(frame);
    }

    /** Batches, or null: {@link Batches#of}. */
    public static Batches batches(Dataset<Row> frame) {
        return Batches.of(frame);
    }

    /** One task per core, each with whole partitions: a task has its own connections. */
    private static <T, U> List<U> collect(
            JavaRDD<T> source, int cores, PartitionTasks.Task<Part, U> task) {
        RDD<Part> parts = new PartitionTasks<T, Part>(source.rdd(), (number, some) ->
                Collections.singleton(new Part(number, some)).iterator());
        RDD<Part> coalesced = parts.coalesce(cores, false, new Some<>(new ByExecutor()), null);
        return new PartitionTasks<>(coalesced, task).all();
    }

    /** The rows of an element of an RDD: a row, or a batch of them. */
    private static int rowsOf(Object element) {
        return element instanceof CachedBatch ? ((CachedBatch) element).numRows()
                : element instanceof ColumnarBatch ? ((ColumnarBatch) element).numRows() : 1;
    }

    /**
     * The rows of each partition by its number, as JSON, for partitions that have any. They are
     * remembered for an RDD that Spark keeps: {@link #forget}.
     */
    public static String count(JavaRDD<?> rows, int cores) throws IOException {
        boolean kept = rows.getStorageLevel() != StorageLevel.NONE();
        String known = kept ? COUNTS.get(rows.rdd()) : null;
        if (known != null) {
            return known;
        }
        String found = Target.JSON.writeValueAsString(collect(rows, cores, (task, parts) -> {
            List<long[]> pairs = new ArrayList<>();
            while (parts.hasNext()) {
                Part part = parts.next();
                long count = 0;
                while (part.elements.hasNext()) {
                    count += rowsOf(part.elements.next());
                }
                if (count > 0) {
                    pairs.add(new long[] {part.number, count});
                }
            }
            return pairs.iterator();
        }));
        if (kept) {
            COUNTS.put(rows.rdd(), found);
        }
        return found;
    }

    /** The rows are others than when they were counted. */
    public static void forget(JavaRDD<?> rows) {
        COUNTS.remove(rows.rdd());
    }

    /**
     * Send rows, or batches of them, ordered by partition: p begins at row {@code starts[p]}; the
     * tasks' reports, as JSON.
     */
    public static String ordered(JavaRDD<?> rows, int cores, String spec) {
        return reports(rows, cores, new Task(spec, Task.ORDERED));
    }

    /** Send IndexedRows, whose numbers must be below 2^31. */
    public static String numbered(JavaRDD<?> rows, int cores, String spec) {
        return reports(rows, cores, new Task(spec, Task.NUMBERED));
    }

    /** Send the blocks of a BlockMatrix. */
    public static String blocks(JavaRDD<?> blocks, int cores, String spec) {
        return reports(blocks, cores, new Task(spec, Task.BLOCKS));
    }

    private static String reports(JavaRDD<?> rows, int cores, Task task) {
        return "[" + String.join(",", collect(rows, cores, task)) + "]"; // py4j asks for each item
    }

    private static final class Task implements PartitionTasks.Task<Part, String> {
        static final int ORDERED = 0, NUMBERED = 1, BLOCKS = 2;
        private static final long serialVersionUID = 2;

        private final String spec;
        private final int form;

        Task(String spec, int form) {
            this.spec = spec;
            this.form = form;
        }

        @Override
        public Iterator<String> run(int number, Iterator<Part> parts) throws IOException {
            TaskContext context = TaskContext.get();
            int attempt = Math.max(context.attemptNumber(), context.stageAttemptNumber());
            Map<String, Object> report = new LinkedHashMap<>();
            if (attempt > 0) {
                while (parts.hasNext()) { // if the source fails again, its error says more
                    for (Iterator<?> some = parts.next().elements; some.hasNext();) {
                        some.next();
                    }
                }
                report.put("again", attempt);
            } else {
                send(parts, report);
            }
            return Collections.singleton(Target.JSON.writeValueAsString(report)).iterator();
        }

        private void send(Iterator<Part> parts, Map<String, Object> report) throws IOException {
            JsonNode json = Target.JSON.readTree(spec);
            Target target = new Target(json);
            try (Block block = new Block(target)) {
                if (form == BLOCKS) {
                    report.put("blocks", blocks(parts, json.get("block"), block, target));
                } else {
                    Columns columns = new Columns(json.get("columns"), target.element);
                    if (form == NUMBERED) {
                        report.put("places", numbered(parts, columns, block, target));
                    } else {
                        Stored stored = new Stored(columns, target.element, block);
                        JsonNode starts = json.get("starts");
                        report.put("seen", ordered(parts, columns, block, stored, starts));
                        report.put("direct", stored.direct());
                    }
                }
                report.put("times", block.finish());
            } catch (Failure failure) {
                report.put("failure", failure.toMap());
            } catch (IOException error) {
                report.put("failure", new Failure(
                        "TransferError",
                        "a Spark executor could not send its rows: " + error).toMap());
            }
        }

        /** The rows of each partition. */
        private static Map<String, Long> ordered(
                Iterator<Part> parts, Columns columns, Block block, Stored stored, JsonNode starts)
                throws IOException {
            Map<String, Long> seen = new LinkedHashMap<>();
            while (parts.hasNext()) {
                Part part = parts.next();
                boolean known = part.number + 1 < starts.size();
                long first = known ? starts.get(part.number).asLong() : 0, row = first;
                long stop = known ? starts.get(part.number + 1).asLong() : 0;
                while (part.elements.hasNext()) {
                    Object its = part.elements.next();
                    int count = rowsOf(its);
                    if (row + count > stop) {
                        throw new Failure(
                                "TransferError",
                                "partition " + part.number + " has more rows than when it was "
                                        + "counted, so its rows change between jobs: df.cache() "
                                        + "or df.checkpoint() it first");
                    }
                    if (its instanceof DefaultCachedBatch) {
                        stored.send((DefaultCachedBatch) its, row);
                    } else if (its instanceof ColumnarBatch) {
                        send((ColumnarBatch) its, row, columns, block);
                    } else {
                        columns.read(its, block.bytes, block.offset());
                        block.add(row);
                    }
                    row += count;
                }
                if (row > first) {
                    seen.put(Integer.toString(part.number), row - first);
                }
            }
            return seen;
        }

        /** Send a batch by columns, in parts that fit a block. */
        private static void send(ColumnarBatch batch, long row, Columns columns, Block block)
                throws IOException {
            for (int start = 0, count; start < batch.numRows(); start += count) {
                count = Math.min(block.capacity(), batch.numRows() - start);
                columns.read(batch, start, count, block.bytes);
                block.put(
                        new long[] {row + start, row + start + count, 0, columns.width()},
                        block.bytes);
            }
        }

        /** A number, and a bit for each row from it on, compressed: whether it was sent. */
        private static Map<String, Object> numbered(
                Iterator<Part> parts, Columns columns, Block block, Target target)
                throws IOException {
            BitSet places = new BitSet();
            while (parts.hasNext()) {
                for (Iterator<?> rows = parts.next().elements; rows.hasNext();) {
                    IndexedRow its = (IndexedRow) rows.next();
                    long row = its.index();
                    if (row < 0 || row >= target.rows) {
                        throw new Failure(
                                "ShapeError",
                                "row " + row + " is outside of a " + target.rows + " x "
                                        + target.cols + " matrix");
                    }
                    if (places.get(Math.toIntExact(row))) {
                        throw Block.duplicate("row " + row);
                    }
                    places.set((int) row);
                    columns.read(its, block.bytes, block.offset());
                    block.add(row);
                }
            }
            int first = Math.max(0, places.nextSetBit(0)) & ~7; // whole bytes
            Map<String, Object> found = new LinkedHashMap<>();
            found.put("first", first);
            found.put("bits", deflated(places.get(first, places.length()).toByteArray()));
            return found;
        }

        /** The rows and columns of the blocks in the matrix of blocks. */
        private static Set<List<Integer>> blocks(
                Iterator<Part> parts, JsonNode size, Block block, Target target)
                throws IOException {
            long down = size.get(0).asLong(), across = size.get(1).asLong();
            Set<List<Integer>> places = new LinkedHashSet<>();
            byte[] stored = {};
            while (parts.hasNext()) {
                for (Iterator<?> some = parts.next().elements; some.hasNext();) {
                    Tuple2<?, ?> its = (Tuple2<?, ?>) some.next();
                    Tuple2<?, ?> place = (Tuple2<?, ?>) its._1();
                    int i = (Integer) place._1(), j = (Integer) place._2();
                    Matrix matrix = (Matrix) its._2();
                    String name = "block (" + i + ", " + j + ")";
                    if (!places.add(Arrays.asList(i, j))) {
                        throw Block.duplicate(name);
                    }
                    long height = Math.min(down, target.rows - i * down);
                    long width = Math.min(across, target.cols - j * across);
                    if (matrix.numRows() != height || matrix.numCols() != width) {
                        throw new Failure(
                                "ShapeError",
                                name + " has shape (" + matrix.numRows() + ", " + matrix.numCols()
                                        + "); in a " + target.rows + " x " + target.cols
                                        + " matrix of " + down + " x " + across
                                        + " blocks it must have (" + height + ", " + width + ")");
                    }
                    double[] values = matrix.toArray(); // by columns
                    if (stored.length < values.length * target.element.nbytes) {
                        stored = new byte[values.length * target.element.nbytes];
                    }
                    target.element.store(stored, 0, values, name);
                    long row = i * down, col = j * across;
                    block.put(new long[] {row, row + height, col, col + width}, stored);
                }
            }
            return places;
        }

        /** Compressed: Spark limits the size of a job's results. */
        private static byte[] deflated(byte[] bits) throws IOException {
            ByteArrayOutputStream found = new ByteArrayOutputStream();
            Deflater fast = new Deflater(Deflater.BEST_SPEED);
            try (DeflaterOutputStream stream = new DeflaterOutputStream(found, fast)) {
                stream.write(bits);
            } finally {
                fast.end();
            }
            return found.toByteArray();
        }
    }
}
