package alchemist.spark;

import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import java.util.NoSuchElementException;
import java.util.function.LongFunction;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.JavaSparkContext;
import org.apache.spark.mllib.linalg.DenseMatrix;
import org.apache.spark.mllib.linalg.DenseVector;
import org.apache.spark.mllib.linalg.Matrix;
import org.apache.spark.mllib.linalg.Vector;
import org.apache.spark.mllib.linalg.distributed.BlockMatrix;
import org.apache.spark.mllib.linalg.distributed.CoordinateMatrix;
import org.apache.spark.mllib.linalg.distributed.IndexedRow;
import org.apache.spark.mllib.linalg.distributed.IndexedRowMatrix;
import org.apache.spark.mllib.linalg.distributed.MatrixEntry;
import org.apache.spark.mllib.linalg.distributed.RowMatrix;
import org.apache.spark.rdd.RDD;
import scala.Tuple2;

/** A matrix as one of MLlib's: lazy, tasks fetch the elements. The session calls it through py4j. */
public final class Matrices {
    private Matrices() {}

    /** Makes objects of MLlib of a region's elements. */
    private interface Conversion<T> extends Serializable {
        Iterator<T> of(long[] region, byte[] block, Element element);
    }

    public static RowMatrix rows(JavaSparkContext spark, String spec, int partitions) {
        Target target = Target.parse(spec);
        RDD<Vector> rows = fetched(
                spark, batches(target, partitions), partitions, spec, true, Vector.class,
                (region, block, element) -> each(region, row -> row(row, region, block, element)));
        return new RowMatrix(rows, target.rows, target.cols);
    }

    public static IndexedRowMatrix indexedRows(
            JavaSparkContext spark, String spec, int partitions) {
        Target target = Target.parse(spec);
        RDD<IndexedRow> rows = fetched(
                spark, batches(target, partitions), partitions, spec, true, IndexedRow.class,
                (region, block, element) -> each(
                        region,
                        row -> new IndexedRow(row, row(row, region, block, element))));
        return new IndexedRowMatrix(rows, target.rows, target.cols);
    }

    /** The nonzero elements. */
    public static CoordinateMatrix entries(JavaSparkContext spark, String spec, int partitions) {
        Target target = Target.parse(spec);
        RDD<MatrixEntry> entries = fetched(
                spark, batches(target, partitions), partitions, spec, true, MatrixEntry.class,
                (region, block, element) -> {
                    List<MatrixEntry> found = new ArrayList<>();
                    for (long row = region[0]; row < region[1]; row++) {
                        double[] values = row(row, region, block, element).values();
                        for (int j = 0; j < values.length; j++) {
                            if (values[j] != 0) {
                                found.add(new MatrixEntry(row, j, values[j]));
                            }
                        }
                    }
                    return found.iterator();
                });
        return new CoordinateMatrix(entries, target.rows, target.cols);
    }

    /** Blocks of {@code down} rows and {@code across} columns; the last ones are smaller. */
    public static BlockMatrix blocks(
            JavaSparkContext spark, String spec, int partitions, int down, int across) {
        Target target = Target.parse(spec);
        List<long[]> regions = new ArrayList<>();
        for (long row = 0; row < target.rows; row += down) {
            for (long col = 0; col < target.cols; col += across) {
                regions.add(new long[] {
                    row, Math.min(row + down, target.rows), col, Math.min(col + across, target.cols)
                });
            }
        }
        RDD<Tuple2<Tuple2<Object, Object>, Matrix>> blocks = fetched(
                spark, regions, partitions, spec, false, Tuple2.class,
                (region, block, element) -> {
                    int height = (int) (region[1] - region[0]);
                    int width = (int) (region[3] - region[2]);
                    double[] values = new double[height * width];
                    element.load(block, 0, values);
                    Tuple2<Object, Object> place =
                            new Tuple2<>((int) (region[0] / down), (int) (region[2] / across));
                    Matrix matrix = new DenseMatrix(height, width, values);
                    return Collections.singleton(new Tuple2<>(place, matrix)).iterator();
                });
        return new BlockMatrix(blocks, down, across, target.rows, target.cols);
    }

    private static <T> Iterator<T> each(long[] region, LongFunction<T> make) {
        return new Iterator<T>() { // a LongStream's own takes longer than to make a row
            private long row = region[0];

            @Override
            public boolean hasNext() {
                return row < region[1];
            }

            @Override
            public T next() {
                return make.apply(row++);
            }
        };
    }

    private static DenseVector row(long row, long[] region, byte[] block, Element element) {
        double[] values = new double[(int) region[3]];
        element.load(block, (int) (row - region[0]) * values.length * element.nbytes, values);
        return new DenseVector(values);
    }

    /** Regions of whole rows: at least one in each partition. */
    private static List<long[]> batches(Target target, int partitions) {
        long fitting = Fetcher.BATCH_BYTES / ((long) target.cols * target.element.nbytes);
        long share = (target.rows + partitions - 1) / partitions;
        long height = Math.max(1, Math.min(fitting, share));
        List<long[]> found = new ArrayList<>();
        for (long row = 0; row < target.rows; row += height) {
            found.add(new long[] {row, Math.min(row + height, target.rows), 0, target.cols});
        }
        return found;
    }

    /** Objects that tasks make of regions of a matrix. */
    private static <T> RDD<T> fetched(
            JavaSparkContext spark, List<long[]> regions, int partitions, String spec,
            boolean byRow, Class<? super T> type, Conversion<T> conversion) {
        return new PartitionTasks<>(
                spark.parallelize(regions, partitions).rdd(), type,
                (number, some) -> new Fetched<>(spec, byRow, some, conversion));
    }

    private static final class Fetched<T> implements Iterator<T> {
        private final Fetcher fetcher;
        private final boolean byRow;
        private final Iterator<long[]> regions;
        private final Conversion<T> conversion;
        private Iterator<T> batch = Collections.emptyIterator();
        private byte[] block = {};

        Fetched(String spec, boolean byRow, Iterator<long[]> regions, Conversion<T> conversion) {
            fetcher = new Fetcher(Target.parse(spec));
            this.byRow = byRow;
            this.regions = regions;
            this.conversion = conversion;
            TaskContext.get().addTaskCompletionListener(ended -> {
                try {
                    fetcher.close();
                } catch (IOException error) {
                    throw new UncheckedIOException(error);
                }
            });
        }

        @Override
        public boolean hasNext() {
            while (!batch.hasNext() && regions.hasNext()) {
                long[] region = regions.next();
                try {
                    fetch(region);
                } catch (IOException error) {
                    throw new UncheckedIOException(error);
                }
                batch = conversion.of(region, block, fetcher.target.element);
            }
            return batch.hasNext();
        }

        private void fetch(long[] region) throws IOException {
            int height = (int) (region[1] - region[0]);
            int stride = (int) (region[3] - region[2]) * fetcher.target.element.nbytes;
            int nbytes = Math.multiplyExact(height, stride);
            if (block.length < nbytes) {
                block = new byte[nbytes];
            }
            if (byRow) {
                fetcher.rows(region[0], height, block, 0, stride);
            } else {
                fetcher.columns(region, block);
            }
        }

        @Override
        public T next() {
            if (!hasNext()) {
                throw new NoSuchElementException();
            }
            return batch.next();
        }
    }
}
